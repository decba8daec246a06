//! Limits and permissions of this process, which a VMM that it starts inherits.

use std::thread;

use rustix::process::{Resource, getrlimit, setpriority_process};

/// Returns the reason for which a VMM cannot have `count` files open. The VMM raises its soft limit
/// to the hard limit by itself.
pub fn lack_of_open_files(count: u64) -> Option<String> {
    let hard = getrlimit(Resource::Nofile).maximum.filter(|hard| *hard < count)?;
    Some(format!("the hard limit of open files is {hard}, and {count} are needed (`ulimit -Hn`)"))
}

/// Returns the reason for which a thread of a VMM cannot have the nice value `nice`.
pub fn lack_of_priority(nice: i32) -> Option<String> {
    // Uses a short-lived thread, because the nice value is per thread.
    let result = thread::spawn(move || setpriority_process(None, nice));
    let err = result.join().expect("does not panic").err()?;
    Some(format!(
        "no thread may have the nice value {nice}, which needs CAP_SYS_NICE or RLIMIT_NICE: {err}"
    ))
}

#[cfg(test)]
mod tests {
    use std::io;

    use rustix::process::getpriority_process;

    use super::*;

    #[test]
    fn open_files_above_the_hard_limit_are_reported() {
        assert_eq!(lack_of_open_files(1), None);
        // The kernel accepts no limit above fs.nr_open, which has 31 bits.
        let lack = lack_of_open_files(1 << 31).expect("a lack");
        assert!(lack.contains("and 2147483648 are needed"), "{lack}");
    }

    #[test]
    fn refused_priority_is_reported() {
        let priority = || getpriority_process(None).unwrap();
        let before = priority();
        assert_eq!(lack_of_priority(19), None);
        assert_eq!(priority(), before, "the calling thread keeps its priority");
        let lack = thread::spawn(|| {
            give_up_priority();
            lack_of_priority(-10)
        });
        let lack = lack.join().unwrap().expect("a lack");
        assert!(lack.contains("nice value -10") && lack.contains("CAP_SYS_NICE"), "{lack}");
    }

    /// Takes all capabilities from the calling thread, and the permission of RLIMIT_NICE from the
    /// process. No other test of this program raises a priority.
    fn give_up_priority() {
        /// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h.
        const VERSION: u32 = 0x2008_0522;
        let (header, none) = ([VERSION, 0], [0u32; 6]);
        // SAFETY: a header of two numbers and two sets of three numbers (capset(2)) outlive the
        // call, which only reads them. 0 is the calling thread.
        let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is a whole rlimit that outlives the calls, which access nothing else.
        let result = unsafe {
            libc::getrlimit(libc::RLIMIT_NICE, &raw mut limit);
            limit.rlim_cur = 0;
            libc::setrlimit(libc::RLIMIT_NICE, &raw const limit)
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}
