//! Makes flushes succeed without effect. The resulting loss of data proves that a durability test
//! can fail.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// All system calls with which a program can flush its writes to the disk.
const FLUSHES: [libc::c_long; 6] = [
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_msync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_sync,
];

/// Makes every flush by the command's program succeed without effect.
///
/// A seccomp filter (Linux Documentation/userspace-api/seccomp_filter.rst) intercepts the system
/// calls. With SECCOMP_RET_ERRNO and an error number of 0, a call is not executed but succeeds.
pub(crate) fn disable_flushes(command: &mut Command) -> &mut Command {
    let filter = filter();
    // SAFETY: prctl is async-signal-safe. The filter was created before the fork, and nothing is
    // allocated after the fork.
    unsafe { command.pre_exec(move || install(&filter)) }
}

/// Returns a filter that loads the number of the system call and compares it with each kind of
/// flush.
fn filter() -> Vec<libc::sock_filter> {
    // seccomp_data begins with the system call number. No program here uses another architecture.
    let statement = |code: u32, jump_true: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: 0,
        k,
    };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, number) in (0u8..).zip(FLUSHES) {
        // Number of statements to skip to reach the last one: the remaining comparisons and the
        // statement that allows the call.
        let over = FLUSHES.len() as u8 - index;
        filter.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, over, number as u32));
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO));
    filter
}

fn install(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the call takes no pointers. An unprivileged process may install a filter only after
    // this call.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel copies the program, which outlives the call, and does not write to it.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }
        != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_flush_succeeds_and_output_is_unchanged() {
        // sync of a pipe fails with EINVAL, but succeeds with the filter. The output can still be
        // read.
        let output = |is_disabled: bool| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo said; exec sync -d /dev/stdout"]);
            if is_disabled {
                disable_flushes(&mut command);
            }
            command.output().unwrap()
        };
        let (unfiltered, filtered) = (output(false), output(true));
        assert!(!unfiltered.status.success(), "sync of a pipe succeeded: {unfiltered:?}");
        assert!(filtered.status.success(), "{filtered:?}");
        assert_eq!(filtered.stdout, b"said\n");
    }
}
