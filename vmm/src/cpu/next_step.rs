//! Next step of a vCPU thread after an exit.

use std::io;

use super::run::VcpuEvent;

/// Next step of the vCPU thread.
pub(super) enum Next {
    Again,
    /// The vCPU's store found no space, and is repeated after a short time.
    Wait,
    /// The vCPU cannot continue, and waits until it is stopped.
    Park(VcpuEvent),
}

/// Next step of the vCPU thread after a failed KVM_RUN.
pub(super) fn next_after(
    errno: i32,
    index: u8,
    memory_is_lost: impl FnOnce() -> bool,
    lacked_space: bool,
    rip: impl FnOnce() -> u64,
) -> Next {
    match errno {
        libc::EINTR | libc::EAGAIN => Next::Again,
        // The accessed memory has been lost. The inhibitor is set, so this vCPU cannot enter the
        // guest again.
        libc::EFAULT if memory_is_lost() => Next::Again,
        libc::EFAULT if lacked_space => Next::Wait,
        libc::EFAULT => Next::Park(VcpuEvent::UnpluggedAccess { index, rip: rip() }),
        errno => {
            let what = io::Error::from_raw_os_error(errno).to_string();
            Next::Park(VcpuEvent::Failed { index, what })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unplugged_access_parks_vcpu_unless_memory_or_space_is_missing() {
        let after = |errno, lost, full| match next_after(errno, 1, || lost, full, || 0xabc) {
            Next::Again => "again".to_owned(),
            Next::Wait => "wait".to_owned(),
            Next::Park(event) => event.to_string(),
        };
        let unplugged = VcpuEvent::UnpluggedAccess { index: 1, rip: 0xabc }.to_string();
        assert_eq!(after(libc::EFAULT, false, false), unplugged);
        assert_eq!(after(libc::EFAULT, false, true), "wait");
        for full in [false, true] {
            assert_eq!(after(libc::EFAULT, true, full), "again");
            assert_eq!(after(libc::EINTR, false, full), "again");
            for lost in [false, true] {
                assert!(after(libc::ENOMEM, lost, full).contains("Cannot allocate memory"));
            }
        }
    }
}
