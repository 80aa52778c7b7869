//! Tells whether khugepaged may fill holes of guest RAM.
//!
//! Before: guest RAM is in a shared memory file, and some of its holes are far pages. After: it is known whether the
//! kernel may collapse such a range by itself, with zeros in the holes.
//! Threads: any. Promise: if that cannot be known, the result is that the kernel may.
//!
//! Since Linux 6.4 a collapse respects a registration for missing faults. Older kernels fill the holes: khugepaged does
//! so on its own in shared memory files that it may make huge. This was seen on Linux 6.1, with one hole in four pages:
//! unless `enabled` is `never`, it fills them with a `shmem_enabled` of `always` and `within_size`, and with `advise`
//! after `MADV_HUGEPAGE`, which QEMU uses. It does not fill them with `never` and `deny`. The mount option `huge=` of a
//! tmpfs overrides `shmem_enabled`, except `force` and `deny`.

use std::fs;

use super::finding::{Finding, Presence, no, warn, yes};
use super::host::{kernel_release, selected};
use super::kernel::collapse_spares_holes;

/// The settings that decide it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Khugepaged {
    /// Does a collapse fill the holes of a registered range? `None` if it could not be tried (Linux before 6.1).
    pub fills: Option<bool>,
    /// The kernel's release.
    pub release: String,
    /// `transparent_hugepage/enabled`; `None` if the kernel has no huge pages.
    pub enabled: Option<String>,
    /// `transparent_hugepage/shmem_enabled`, likewise.
    pub shmem: Option<String>,
}

/// The setting that decides whether a shared memory file may become huge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind<'a> {
    /// By `shmem_enabled`: a memfd.
    Memfd,
    /// By the mount option `huge=` of its tmpfs; `None` if the mount has none.
    Tmpfs(Option<&'a str>),
    /// This process does not see its mount.
    Unknown,
}

impl Khugepaged {
    /// The settings now. The result of `tried` stays true as long as the kernel runs.
    pub fn now(tried: Option<bool>) -> Self {
        const DIRECTORY: &str = "/sys/kernel/mm/transparent_hugepage";
        let setting = |name: &str| selected(&format!("{DIRECTORY}/{name}")).ok();
        let (enabled, shmem) = (setting("enabled"), setting("shmem_enabled"));
        Self { fills: tried, release: kernel_release(), enabled, shmem }
    }

    /// The setting to change before holes in such a file are safe; `None` if they are.
    pub fn danger(&self, kind: Kind<'_>) -> Option<String> {
        /// The first kernel whose collapse respects userfaultfds.
        const SPARES: (u32, u32) = (6, 4);
        let may_fill = self.fills.unwrap_or_else(|| version(&self.release).is_none_or(|version| version < SPARES));
        let never = |setting: &Option<String>| setting.as_deref().is_none_or(|word| word == "never");
        if !may_fill || never(&self.enabled) || self.shmem.as_deref().is_none_or(|word| word == "deny") {
            return None;
        }
        let shmem = self.shmem.as_deref().unwrap_or_default();
        let shmem_is =
            || format!("shmem_enabled is {shmem}: write never to /sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let what = match kind {
            _ if shmem == "force" => shmem_is(),
            Kind::Memfd if shmem == "never" => return None,
            Kind::Memfd => shmem_is(),
            Kind::Tmpfs(None | Some("never")) => return None,
            Kind::Tmpfs(Some(huge)) => format!("its tmpfs is mounted with huge={huge}: mount it with huge=never"),
            Kind::Unknown => "the mount of its tmpfs is not seen: use a memfd".into(),
        };
        Some(format!("khugepaged of Linux {} fills holes of guest RAM with zeros, and {what}", self.release))
    }
}

/// Does a collapse fill the holes of a registered range? Tries it on memory of its own; `None` if it cannot be tried.
pub fn fills_holes() -> Option<bool> {
    match collapse_spares_holes().0 {
        Presence::Yes | Presence::Warn => Some(false),
        Presence::No => Some(true),
        Presence::Unknown(_) => None,
    }
}

pub(super) fn finding() -> Finding {
    let now = Khugepaged::now(fills_holes());
    match now.danger(Kind::Memfd) {
        None => yes(now.shmem.map_or("no huge pages".into(), |shmem| format!("shmem_enabled is {shmem}"))),
        Some(danger) => no(danger),
    }
}

/// Is guest RAM in a memfd in huge pages, as QEMU asks for?
pub(super) fn huge_memfds() -> Finding {
    of_memfds(&Khugepaged::now(fills_holes()))
}

fn of_memfds(now: &Khugepaged) -> Finding {
    const WRITE: &str = "write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Some(shmem) = now.shmem.as_deref() else { return no("the kernel has no huge pages") };
    let advised = Khugepaged { shmem: Some("advise".into()), ..now.clone() };
    match (matches!(shmem, "never" | "deny"), advised.danger(Kind::Memfd).is_some()) {
        (false, _) => yes(format!("shmem_enabled is {shmem}")),
        (true, true) => no(format!("shmem_enabled is {shmem}, and must be before Linux 6.4")),
        (true, false) => warn(format!("shmem_enabled is {shmem}: {WRITE}")),
    }
}

/// The option `huge=` of this device's mount in the text of `/proc/self/mountinfo`; `None` if it is not mounted.
pub fn huge_option(mountinfo: &str, major: u32, minor: u32) -> Option<Option<&str>> {
    let device = format!("{major}:{minor}");
    let mount = mountinfo.lines().find(|line| line.split_ascii_whitespace().nth(2) == Some(&device))?;
    let options = mount.split_ascii_whitespace().next_back()?;
    Some(options.split(',').find_map(|option| option.strip_prefix("huge=")))
}

/// The same for the tmpfs of this device that is mounted now.
pub fn mount_of(major: u32, minor: u32) -> Option<Option<String>> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").ok()?;
    huge_option(&mountinfo, major, minor).map(|huge| huge.map(str::to_owned))
}

/// Major and minor version of a release such as `6.1.0-56-cloud-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(fills: Option<bool>, release: &str, enabled: &str, shmem: &str) -> Khugepaged {
        let [enabled, shmem] = [enabled, shmem].map(|word| Some(word.to_owned()));
        Khugepaged { fills, release: release.into(), enabled, shmem }
    }

    #[test]
    fn huge_pages_for_a_memfd_are_advised_where_the_kernel_does_not_fill_holes() {
        for (fills, release, shmem, presence) in [
            (Some(false), "6.12.1", "never", Presence::Warn),
            (Some(false), "6.12.1", "advise", Presence::Yes),
            (Some(true), "6.1.0", "never", Presence::No),
            (None, "6.5.0", "deny", Presence::Warn),
        ] {
            assert_eq!(of_memfds(&with(fills, release, "madvise", shmem)).0, presence, "{release} {shmem}");
        }
        let none = Khugepaged { shmem: None, ..with(None, "6.12.1", "never", "never") };
        assert_eq!(of_memfds(&none).0, Presence::No);
    }

    #[test]
    fn a_memfd_is_in_danger_where_the_kernel_fills_holes_and_may_make_it_huge() {
        let table = [
            // As tried on Linux 6.1; untried cases go by the version.
            (Some(true), "6.1.0-56-cloud-amd64", "madvise", "always", true),
            (Some(true), "6.1.0-56-cloud-amd64", "madvise", "within_size", true),
            (Some(true), "6.1.0-56-cloud-amd64", "always", "advise", true),
            (Some(true), "6.1.0-56-cloud-amd64", "always", "force", true),
            (Some(true), "6.1.0-56-cloud-amd64", "always", "never", false),
            (Some(true), "6.1.0-56-cloud-amd64", "always", "deny", false),
            (Some(true), "6.1.0-56-cloud-amd64", "never", "always", false),
            (None, "5.14.0-427.el9.x86_64", "always", "advise", true),
            (None, "6.3.9", "always", "always", true),
            (None, "6.4.0", "always", "always", false),
            (None, "a kernel of one's own", "always", "always", true),
            // A distributor's kernel may have it although its version says no, and the reverse.
            (Some(false), "5.14.0-427.el9.x86_64", "always", "always", false),
            (Some(true), "6.18.0", "always", "always", true),
        ];
        for (fills, release, enabled, shmem, expected) in table {
            let danger = with(fills, release, enabled, shmem).danger(Kind::Memfd);
            assert_eq!(danger.is_some(), expected, "{fills:?} {release} {enabled} {shmem}: {danger:?}");
        }
        let none = Khugepaged { fills: None, release: "5.15.0".into(), enabled: None, shmem: None };
        assert_eq!(none.danger(Kind::Memfd), None, "a kernel without huge pages");
    }

    #[test]
    fn a_file_in_a_tmpfs_follows_its_mount_unless_force_or_deny_holds_for_all_files() {
        let at = |shmem| with(Some(true), "6.1.0", "always", shmem);
        for (kind, expected) in [
            (Kind::Tmpfs(None), [false, false, false, true]),
            (Kind::Tmpfs(Some("never")), [false, false, false, true]),
            (Kind::Tmpfs(Some("advise")), [true, true, false, true]),
            (Kind::Unknown, [true, true, false, true]),
        ] {
            let found = ["never", "always", "deny", "force"].map(|shmem| at(shmem).danger(kind).is_some());
            assert_eq!(found, expected, "{kind:?}");
        }
    }

    #[test]
    fn the_mount_of_a_device_is_found_with_its_option() {
        let text = "26 1 0:24 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=1024k,inode64\n\
                    31 1 0:27 / /mnt/with\\040blank rw shared:3 - tmpfs none rw,huge=within_size\n";
        assert_eq!(huge_option(text, 0, 24), Some(None));
        assert_eq!(huge_option(text, 0, 27), Some(Some("within_size")));
        assert_eq!(huge_option(text, 0, 2), None);
    }

    #[test]
    fn this_kernel_is_tried_and_its_version_says_the_same() {
        let now = Khugepaged::now(fills_holes());
        let Some(fills) = now.fills else { return ballast_testkit::skip("collapse", "MADV_COLLAPSE cannot be tried") };
        assert_eq!(fills, version(&now.release).is_none_or(|version| version < (6, 4)), "{now:?}");
    }
}
