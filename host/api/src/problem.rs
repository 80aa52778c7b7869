//! Errors of the API in the form of RFC 9457 (`application/problem+json`).

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// A stable identifier for programs, such as `urn:ballast:problem:no-such-vm`.
    #[serde(rename = "type", default = "about_blank")]
    pub kind: String,
    /// The kind of problem, in words.
    #[serde(default)]
    pub title: String,
    /// The HTTP status code.
    #[serde(default)]
    pub status: u16,
    /// This occurrence, in words: what, where, and what to do.
    #[serde(default)]
    pub detail: String,
}

fn about_blank() -> String {
    "about:blank".into()
}

impl Problem {
    /// Media type of a problem document.
    pub const MEDIA_TYPE: &'static str = "application/problem+json";
    /// 404: no VM has that name.
    pub const NO_SUCH_VM: &'static str = "urn:ballast:problem:no-such-vm";
    /// 404: no such resource.
    pub const NOT_FOUND: &'static str = "urn:ballast:problem:not-found";
    /// 405: the resource exists, but not this method.
    pub const METHOD: &'static str = "urn:ballast:problem:method-not-allowed";
    /// 400: the body is not valid for this request.
    pub const BAD_REQUEST: &'static str = "urn:ballast:problem:bad-request";
    /// 413: the body is longer than `MAX_BODY_BYTES`.
    pub const TOO_LARGE: &'static str = "urn:ballast:problem:body-too-large";
    /// 422: the request was understood, but the value is not possible.
    pub const INVALID: &'static str = "urn:ballast:problem:invalid-value";
    /// 403: this user may not do this.
    pub const FORBIDDEN: &'static str = "urn:ballast:problem:forbidden";
    /// 408: the request did not arrive in time.
    pub const TIMEOUT: &'static str = "urn:ballast:problem:timeout";
    /// 500: Ballast itself failed.
    pub const INTERNAL: &'static str = "urn:ballast:problem:internal";
    /// 503: too many connections.
    pub const BUSY: &'static str = "urn:ballast:problem:busy";

    /// A problem of this kind. Each problem of a `kind` should have the same `title`.
    pub fn new(status: u16, kind: &str, title: &str, detail: impl Into<String>) -> Self {
        Self { kind: kind.into(), title: title.into(), status, detail: detail.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.detail.is_empty() {
            write!(f, "{} (HTTP {})", self.title, self.status)
        } else {
            f.write_str(&self.detail)
        }
    }
}

impl std::error::Error for Problem {}
