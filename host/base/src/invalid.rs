//! Why a value cannot be used.
//!
//! Before: a person, a file or another process gave the value. After: people read the reason.

use std::borrow::Cow;

/// What is wrong with a value, as the end of a sentence. Programs do not tell one reason from another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(Cow<'static, str>);

impl From<String> for Invalid {
    fn from(why: String) -> Self {
        Self(why.into())
    }
}

impl From<&'static str> for Invalid {
    fn from(why: &'static str) -> Self {
        Self(why.into())
    }
}
