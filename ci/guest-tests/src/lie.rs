//! Flushes that succeed without effect. The resulting loss proves that a test of durability can
//! fail.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// All system calls by which a program flushes its writes to the disk.
const FLUSHES: [libc::c_long; 6] = [
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_msync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_sync,
];

/// Makes every flush of the command's program succeed without effect.
///
/// A seccomp filter (Linux Documentation/userspace-api/seccomp_filter.rst) replaces the system
/// calls. With SECCOMP_RET_ERRNO and an error number of 0, the call is not executed and succeeds.
pub(crate) fn about_flushes(command: &mut Command) -> &mut Command {
    let filter = filter();
    // SAFETY: prctl is async-signal-safe, and the filter was created before the fork. Nothing is
    // allocated after it.
    unsafe { command.pre_exec(move || install(&filter)) }
}

/// Filter that loads the number of the system call and compares it with each of the flushes.
fn filter() -> Vec<libc::sock_filter> {
    // seccomp_data begins with the number. There are no programs of another architecture.
    let statement = |code: u32, jump_true: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: 0,
        k,
    };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, number) in (0u8..).zip(FLUSHES) {
        // Jumps to the last statement, over the following comparisons and the one that allows.
        let over = FLUSHES.len() as u8 - index;
        filter.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, over, number as u32));
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO));
    filter
}

fn install(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: no pointers. Without privileges, a filter requires that the process cannot gain any.
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
        // sync of a pipe fails with EINVAL, except with the filter. The output is still readable.
        let output = |lie: bool| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo said; exec sync -d /dev/stdout"]);
            if lie {
                about_flushes(&mut command);
            }
            command.output().unwrap()
        };
        let (honest, lying) = (output(false), output(true));
        assert!(!honest.status.success(), "sync of a pipe succeeded: {honest:?}");
        assert!(lying.status.success(), "{lying:?}");
        assert_eq!(lying.stdout, b"said\n");
    }
}
