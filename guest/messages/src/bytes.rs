//! Numbers, texts and lists to bytes and back. Little-endian.
//!
//! Before: a message is written or read field by field. After: its bytes, or its fields.
//! Promise: a reader never goes beyond its bytes; a list begins with its length, and no memory is taken for more items
//! than its bytes can hold.
//! them.

/// A body that is no message of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the body is not understood")
    }
}

impl std::error::Error for Refused {}

/// Longest text that is read; more is cut when it is written.
pub const MAX_TEXT: usize = 200;

/// Bytes of a message in the making.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Appends the printable characters of a text, up to [`MAX_TEXT`].
    pub fn text(&mut self, text: &str) {
        let shown: String = text.chars().filter(char::is_ascii).filter(|c| !c.is_ascii_control()).collect();
        let shown = &shown[..shown.len().min(MAX_TEXT)];
        self.u16(shown.len() as u16);
        self.0.extend(shown.bytes());
    }

    pub fn list<T>(&mut self, items: &[T], put: impl Fn(&mut Self, &T)) {
        self.u16(items.len() as u16);
        items.iter().for_each(|item| put(self, item));
    }
}

/// Bytes of a message that are not read yet.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    /// The writer may not have known all fields: missing ones are zero.
    pads: bool,
}

impl<'a> Reader<'a> {
    /// Reads a body; `older`: its writer's version is below this program's.
    pub fn new(body: &'a [u8], older: bool) -> Self {
        Self { rest: body, pads: older }
    }

    /// Returns the next bytes; `None` if the writer did not know this field.
    fn take(&mut self, count: usize) -> Result<Option<&'a [u8]>, Refused> {
        if self.rest.is_empty() && self.pads {
            return Ok(None);
        }
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(Refused)?;
        self.rest = rest;
        Ok(Some(taken))
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let taken = self.take(N)?;
        Ok(taken.map_or([0; N], |bytes| bytes.try_into().expect("as many as were asked for")))
    }

    pub fn u8(&mut self) -> Result<u8, Refused> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Result<u16, Refused> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Refused> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Refused> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a text and keeps only printable characters, because operators see it.
    pub fn text(&mut self) -> Result<String, Refused> {
        let len = usize::from(self.u16()?);
        if len > MAX_TEXT {
            return Err(Refused);
        }
        let bytes = self.take(len)?.unwrap_or_default();
        let printable = bytes.iter().all(|byte| (b' '..=b'~').contains(byte));
        printable.then(|| bytes.iter().map(|byte| char::from(*byte)).collect()).ok_or(Refused)
    }

    /// Reads a list of at most `most` items, of at least `size` bytes each.
    pub fn list<T>(
        &mut self,
        most: usize,
        size: usize,
        get: impl Fn(&mut Self) -> Result<T, Refused>,
    ) -> Result<Vec<T>, Refused> {
        let count = usize::from(self.u16()?);
        if count > most || count * size > self.rest.len() {
            return Err(Refused);
        }
        (0..count).map(|_| get(self)).collect()
    }

    /// Checks that all was read; a newer writer may have appended fields.
    pub fn end(self, newer: bool) -> Result<(), Refused> {
        if self.rest.is_empty() || newer { Ok(()) } else { Err(Refused) }
    }
}
