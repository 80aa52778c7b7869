//! What a program must know that opens the pool after this one.
//!
//! Before: the owner is about to promise memory on demand, or has none promised any more. After: the state says so.
//! Threads: the owner's. Promise: one word changes.

use ballast_base::format::Stamp;

use crate::layout::{FORMAT, ON_DEMAND_SINCE, WORD_STAMP};
use crate::pool::Pool;
use crate::words::Words;

impl<W: Words> Pool<W> {
    /// States whether the pool has memory on demand: then no program opens it that does not know that, because it would
    /// hand out what is promised.
    pub fn state_on_demand(&mut self, has: bool) {
        let words = &mut self.table.words;
        let now = Stamp::from_word(words.load(WORD_STAMP));
        let least_reader = if has { ON_DEMAND_SINCE } else { FORMAT.least_reader };
        if now.least_reader != least_reader {
            words.store(WORD_STAMP, Stamp { least_reader, ..now }.to_word());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, NodeSpec};
    use ballast_base::format::Format;

    #[test]
    fn a_pool_with_memory_on_demand_is_refused_by_the_version_that_does_not_know_it_and_any_other_is_not() {
        let layout = Layout::new(&[NodeSpec { numa: 0, slices: 512 }], 32, 4).expect("a layout");
        let mut pool = Pool::create(vec![0; layout.words()], &layout).expect("made");
        let before = pool.table.words.clone();
        let old = |words: &[u64]| Format { version: 1, least_reader: 1, oldest: 1 }.check(Stamp::from_word(words[1]));
        assert_eq!((before[1], old(&before)), (0x1_0000_0002, Ok(())));
        pool.state_on_demand(true);
        let now = pool.table.words.clone();
        let said = old(&now).expect_err("it would hand out what is promised").to_string();
        assert!(said.contains("version 2 and needs a reader of at least 2; this program has version 1"), "{said}");
        assert_eq!(now[1], 0x2_0000_0002);
        let (mut pool, _) = Pool::open(now).expect("its own reader");
        pool.state_on_demand(false);
        assert_eq!(pool.into_words(), before, "the stamp alone has changed");
        let mut words = before.clone();
        words[1] = 0x1_0000_0001;
        assert_eq!(Pool::open(words).expect("of the version before").0.into_words(), before, "who writes raises it");
    }
}
