//! Threads of a VMM, as /proc shows them.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
pub use foreshore_confinement::thread::ThreadKind;
use guest_tools::wait::wait_for;

/// Flags of threads that the kernel starts in a process, and that run no code of it: workers of
/// io_uring, and those of KVM and vhost (`PF_IO_WORKER` and `PF_USER_WORKER` of linux/sched.h).
const KERNEL_WORKER: u64 = 0x10 | 0x4000;
/// Threads start within milliseconds. The limit only ends a test that has failed.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Field of /proc/PID/stat with the flags, counted from the field after the name (proc(5)).
const FLAGS_FIELD: usize = 6;

/// Thread that runs code of a VMM.
#[derive(Clone, Debug)]
pub struct VmmThread {
    pub id: u32,
    pub name: String,
    /// Content of /proc/PID/task/ID/status.
    status: String,
}

impl VmmThread {
    /// Value of a field of the thread's status (proc(5)).
    pub fn status(&self, key: &str) -> Result<&str> {
        field(&self.status, key).with_context(|| format!("no {key} in {}", self.status))
    }

    /// Kind of the thread, which follows from its name.
    pub fn kind(&self) -> Result<ThreadKind> {
        ThreadKind::of_name(&self.name)
            .with_context(|| format!("thread {} has no known kind", self.name))
    }
}

impl VmmThread {
    /// Returns true if the thread has the filter of its kind, or runs without filters. Most threads
    /// inherit one filter, and then add their own.
    fn has_started(&self) -> bool {
        let own = match ThreadKind::of_name(&self.name) {
            Some(ThreadKind::SetUp | ThreadKind::Vcpu) => 1,
            _ => 2,
        };
        let filters = self.status("Seccomp_filters").ok().and_then(|number| number.parse().ok());
        filters.is_none_or(|number: u32| number == 0 || number >= own)
    }
}

/// Returns all threads of a process except those of the kernel.
pub fn of(pid: u32) -> Result<Vec<VmmThread>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let folder = task?.path();
        let read = |name: &str| fs::read_to_string(folder.join(name));
        // A thread may end while its files are read.
        let (Ok(stat), Ok(status)) = (read("stat"), read("status")) else { continue };
        if flags(&stat)? & KERNEL_WORKER != 0 {
            continue;
        }
        let Some((id, name)) = field(&status, "Pid").zip(field(&status, "Name")) else {
            bail!("no Pid or Name in {status}");
        };
        threads.push(VmmThread { id: id.parse()?, name: name.to_owned(), status });
    }
    Ok(threads)
}

/// Thread that starts vCPUs. It is of their kind, but runs no guest.
const STARTER: &str = "_vcpus";

/// Waits until a process has threads of all `kinds`, which have entered their filters if there are
/// any. Returns one thread of each kind.
pub fn wait_for_kinds(pid: u32, kinds: &[ThreadKind]) -> Result<Vec<VmmThread>> {
    wait_for("each kind of thread has started", START_LIMIT, || {
        let threads = of(pid)?;
        let find = |kind: &ThreadKind| {
            let is_of_kind = |thread: &&VmmThread| {
                ThreadKind::of_name(&thread.name) == Some(*kind) && thread.name != STARTER
            };
            threads.iter().filter(is_of_kind).find(|thread| thread.has_started()).cloned()
        };
        Ok(kinds.iter().map(find).collect())
    })
}

fn field<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(":\t")).map(str::trim)
}

fn flags(stat: &str) -> Result<u64> {
    // The name is in parentheses, and may contain parentheses and spaces.
    let rest = stat.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace());
    let flags = rest.and_then(|mut fields| fields.nth(FLAGS_FIELD));
    Ok(flags.with_context(|| format!("no flags in {stat}"))?.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_kinds() {
        for (name, kind) in [
            ("foreshore", Some(ThreadKind::SetUp)),
            ("vcpu12", Some(ThreadKind::Vcpu)),
            ("_disk0_q3", Some(ThreadKind::Queue)),
            ("_net1_qp0", Some(ThreadKind::Queue)),
            ("vcpu", None),
            ("tokio-runtime", None),
        ] {
            assert_eq!(ThreadKind::of_name(name), kind, "{name}");
        }
    }

    #[test]
    fn flags_follow_a_name_with_parentheses() {
        let stat = "7 (a) b) S 1 1 1 0 -1 1077952576 0 0";
        assert_eq!(flags(stat).unwrap(), 1_077_952_576);
        let own = of(std::process::id()).unwrap();
        assert!(own.iter().all(|thread| thread.status("Pid").unwrap() == thread.id.to_string()));
    }
}
