//! What a keeper must know of the configuration. The rest is its engines', and passes through it as bytes.

use std::path::PathBuf;

/// See the file's head.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The directory of the lock: one keeper at a time has it.
    pub runtime_dir: PathBuf,
    /// Where VMMs attach.
    pub attach_socket: PathBuf,
    /// Where operators ask; the engine answers.
    pub api_socket: PathBuf,
    /// Members of this group may connect to the first of these, beside root.
    pub attach_gid: Option<u32>,
    /// Members of this group may connect to the second.
    pub reader_gid: Option<u32>,
    /// A new VM is to have a file store, which the engine makes.
    pub file_stores: bool,
    /// What the first engine is to begin with.
    pub engine: Vec<u8>,
}
