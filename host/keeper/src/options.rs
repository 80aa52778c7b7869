//! The part of the configuration that the keeper uses. The rest passes through it to its engines, as bytes.

use std::path::PathBuf;

/// The options of the keeper.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The directory of the lock: only one keeper at a time has it.
    pub runtime_dir: PathBuf,
    /// Where VMMs attach.
    pub attach_socket: PathBuf,
    /// Socket of the API, which the engine serves.
    pub api_socket: PathBuf,
    /// Members of this group may connect to the attach socket, beside root.
    pub attach_gid: Option<u32>,
    /// Members of this group may connect to the API socket.
    pub reader_gid: Option<u32>,
    /// Whether a new VM gets a file store, which the engine makes.
    pub file_stores: bool,
    /// Groups whose members store equal pages once, and patterns of their members' names.
    pub groups: Vec<(String, Vec<String>)>,
    /// The settings that the first engine begins with.
    pub engine: Vec<u8>,
}

/// The group of a VM with this name: the first with a pattern that is the name, or that is a prefix of it plus `*`.
pub(crate) fn group_of<'a>(groups: &'a [(String, Vec<String>)], name: &str) -> Option<&'a str> {
    let fits = |pattern: &String| match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    };
    groups.iter().find(|(_, patterns)| patterns.iter().any(fits)).map(|(group, _)| group.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_in_the_first_group_that_names_it() {
        let group = |name: &str, patterns: &[&str]| (name.to_owned(), patterns.iter().map(|p| (*p).into()).collect());
        let groups = [group("a", &["db", "web-*"]), group("b", &["web-1", "db-*", "d*b"])];
        let of = |name| group_of(&groups, name);
        assert_eq!([of("db"), of("web-"), of("web-1")], [Some("a"); 3]);
        assert_eq!([of("db-1"), of("d*b")], [Some("b"); 2]);
        assert_eq!([of("web"), of("dxb"), of("")], [None; 3]);
    }
}
