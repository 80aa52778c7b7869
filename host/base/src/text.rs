//! Texts from outside, for people: a character that a terminal obeys, or does not show, is written as its number.
//!
//! Before: a client, a guest or an operator chose a text. After: it is a line in a log, a list, or a metric's label.
//! Threads: any. Promise: two texts that differ are shown differently.

use std::borrow::Cow;
use std::fmt::Write;

/// Is it a control character, or one that is invisible or changes how its neighbours are shown?
fn is_hidden(c: char) -> bool {
    let others = ['\u{61c}', '\u{feff}'];
    let ranges = ['\u{200b}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2060}'..='\u{206f}'];
    c.is_control() || others.contains(&c) || ranges.iter().any(|range| range.contains(&c))
}

/// Does this text begin with a character that [`shown`] writes as an escape?
fn escapes(text: &str) -> bool {
    text.starts_with(is_hidden) || text.starts_with("\\u{")
}

/// The text with an escape such as `\u{1b}` for each hidden character, and for a backslash that begins such an escape.
pub fn shown(text: &str) -> Cow<'_, str> {
    if !text.char_indices().any(|(at, _)| escapes(&text[at..])) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for (at, c) in text.char_indices() {
        if escapes(&text[at..]) {
            let _ = write!(shown, "{}", c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// As [`shown`], for lines in which names are escaped already: backslashes and ends of lines stay.
pub fn lines_shown(text: &str) -> Cow<'_, str> {
    let escapes = |c| c != '\n' && is_hidden(c);
    if !text.contains(escapes) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if escapes(c) { c.escape_unicode().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

/// As [`shown`], in printable ASCII.
pub fn ascii(text: &str) -> String {
    let escape = |c: char| if c.is_ascii() { c.to_string() } else { c.escape_unicode().to_string() };
    shown(text).chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_or_hides_is_shown_as_its_number_and_nothing_else_changes() {
        for text in ["web/1", "Büro-東京", "C:\\users", "", "a b"] {
            assert_eq!(shown(text), text);
        }
        assert_eq!(shown("a\u{1b}[2Jb\n\u{202e}c"), "a\\u{1b}[2Jb\\u{a}\\u{202e}c");
        assert_ne!(shown("\u{1b}"), shown("\\u{1b}"), "two names are two");
        assert_eq!(shown("\\u{1b}"), "\\u{5c}u{1b}");
        assert_eq!(lines_shown("web\\u{1b}\n\u{1b}[2Jb\u{9b}\n"), "web\\u{1b}\n\\u{1b}[2Jb\\u{9b}\n");
        assert_eq!(ascii("ü\r"), "\\u{fc}\\u{d}");
    }
}
