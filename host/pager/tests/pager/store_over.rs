//! Slow stores of tests that differ from a store in memory only in some of their methods.

/// Implements `Store` and `DurableStore` for a type that puts, frees, counts and recovers as its field of this name;
/// the other methods of `Store` follow.
macro_rules! store_over {
    ($field:tt, $store:ty, $($rest:tt)*) => {
        impl Store for $store {
            fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
                self.$field.put(key, bytes)
            }

            fn free(&self, key: PageKey, handle: Handle) {
                self.$field.free(key, handle);
            }

            fn usage(&self) -> ballast_store::StoreUsage {
                self.$field.usage()
            }

            $($rest)*
        }

        impl ballast_store::DurableStore for $store {
            fn recover(
                &self,
                live: &mut dyn Iterator<Item = (PageKey, Handle)>,
            ) -> std::io::Result<ballast_store::Recovered> {
                self.$field.recover(live)
            }
        }
    };
}
