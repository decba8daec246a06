//! DRAM of the host that this process may still use.

use std::fs;
use std::path::{Path, PathBuf};

/// Folder that contains the host's `proc` and `sys`.
#[derive(Debug)]
pub(super) struct HostDram(PathBuf);

impl HostDram {
    pub(super) fn new() -> Self {
        Self("/".into())
    }

    #[cfg(test)]
    pub(super) fn in_folder(folder: &Path) -> Self {
        Self(folder.into())
    }

    /// Returns the bytes that the kernel can provide before it kills a process: those of the host,
    /// or of the control group with the fewest. `None` if the host does not report them.
    pub(super) fn available_bytes(&self) -> Option<u64> {
        let meminfo = fs::read_to_string(self.0.join("proc/meminfo")).ok()?;
        let of_host_kib = field(&meminfo, "MemAvailable:")?;
        let of_groups = self.control_groups().into_iter().filter_map(|group| unused_bytes(&group));
        of_groups.chain([of_host_kib * 1024]).min()
    }

    /// Returns the folders of this process's control group and its ancestors (cgroups(7), version
    /// 2). A group that is outside the process's namespace has no folder.
    fn control_groups(&self) -> Vec<PathBuf> {
        let root = self.0.join("sys/fs/cgroup");
        let groups = fs::read_to_string(self.0.join("proc/self/cgroup")).unwrap_or_default();
        let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
            return Vec::new();
        };
        let group = root.join(path);
        group.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned).collect()
    }
}

/// Returns the bytes that a group has left, with the page cache that the kernel can reclaim. `None`
/// if the group has no limit.
fn unused_bytes(group: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit_bytes = number("memory.max")?;
    let used_bytes = number("memory.current")?;
    let statistics = fs::read_to_string(group.join("memory.stat")).ok()?;
    // Files of tmpfs count as anonymous memory here.
    let cache_bytes = field(&statistics, "active_file")? + field(&statistics, "inactive_file")?;
    Some(limit_bytes.saturating_sub(used_bytes.saturating_sub(cache_bytes)))
}

/// Returns the number that follows `name` at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
pub(super) mod tests {
    use tempfile::TempDir;

    use super::*;

    /// Creates a host whose process is in the control group `/vms/one`.
    pub(in super::super) fn host(available_kib: u64) -> TempDir {
        let host = TempDir::new().unwrap();
        set_available_kib(&host, available_kib);
        write(&host, "proc/self/cgroup", "1:name=systemd:/other\n0::/vms/one\n");
        host
    }

    pub(in super::super) fn set_available_kib(host: &TempDir, kib: u64) {
        write(host, "proc/meminfo", &format!("MemFree:  1 kB\nMemAvailable:  {kib} kB\n"));
    }

    fn write(host: &TempDir, path: &str, text: &str) {
        let path = host.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn add_group(host: &TempDir, group: &str, limit: &str, used: &str, cache: &str) {
        let file = |name| format!("sys/fs/cgroup/{group}/{name}");
        write(host, &file("memory.max"), &format!("{limit}\n"));
        write(host, &file("memory.current"), &format!("{used}\n"));
        let statistics = format!("anon 7\ninactive_file {cache}\nactive_file 5\nslab 9\n");
        write(host, &file("memory.stat"), &statistics);
    }

    fn available_bytes(host: &TempDir) -> Option<u64> {
        HostDram::in_folder(host.path()).available_bytes()
    }

    #[test]
    fn smallest_of_host_and_groups_is_available() {
        let host = host(100);
        assert_eq!(available_bytes(&host), Some(100 << 10));
        add_group(&host, "vms/one", "max", "8000", "0");
        assert_eq!(available_bytes(&host), Some(100 << 10));
        add_group(&host, "vms", "9000", "8000", "300");
        assert_eq!(available_bytes(&host), Some(1305));
        add_group(&host, "vms/one", "8200", "8000", "100");
        assert_eq!(available_bytes(&host), Some(305));
        add_group(&host, "vms/one", "8200", "9000", "100");
        assert_eq!(available_bytes(&host), Some(0));
        // The limit of another group does not matter.
        add_group(&host, "other", "1", "1", "0");
        add_group(&host, "vms/one", "max", "1", "0");
        assert_eq!(available_bytes(&host), Some(1305));
    }

    #[test]
    fn host_without_numbers_is_unknown() {
        let host = TempDir::new().unwrap();
        assert_eq!(available_bytes(&host), None);
        write(&host, "proc/meminfo", "MemAvailable: many kB\n");
        assert_eq!(available_bytes(&host), None);
    }

    #[test]
    fn this_host_reports_available_memory() {
        assert!(HostDram::new().available_bytes().is_some_and(|bytes| bytes > 0));
    }
}
