//! Limits and permissions of this process. A VMM that it starts inherits them.

use std::thread;

use rustix::process::{Resource, getrlimit, setpriority_process};

/// Returns the reason why a VMM cannot open `count` files, if any. The VMM itself raises its soft
/// limit to the hard limit.
pub fn open_files_shortage(count: u64) -> Option<String> {
    let hard = getrlimit(Resource::Nofile).maximum.filter(|hard| *hard < count)?;
    Some(format!("the hard limit of open files is {hard}, and {count} are needed (`ulimit -Hn`)"))
}

/// Returns the reason why a VMM's thread cannot have the nice value `nice`, if any.
pub fn priority_shortage(nice: i32) -> Option<String> {
    // A short-lived thread is used, because the nice value belongs to a thread.
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
        assert_eq!(open_files_shortage(1), None);
        // The kernel accepts no limit above fs.nr_open, which has at most 31 bits.
        let shortage = open_files_shortage(1 << 31).expect("a lack");
        assert!(shortage.contains("and 2147483648 are needed"), "{shortage}");
    }

    #[test]
    fn refused_priority_is_reported() {
        let priority = || getpriority_process(None).unwrap();
        let before = priority();
        assert_eq!(priority_shortage(19), None);
        assert_eq!(priority(), before, "the calling thread keeps its priority");
        let shortage = thread::spawn(|| {
            give_up_priority();
            priority_shortage(-10)
        });
        let shortage = shortage.join().unwrap().expect("a lack");
        assert!(
            shortage.contains("nice value -10") && shortage.contains("CAP_SYS_NICE"),
            "{shortage}"
        );
    }

    /// Drops all capabilities of the calling thread, and the permission that RLIMIT_NICE gives the
    /// process. No other test in this program raises a priority.
    fn give_up_priority() {
        /// Value of `_LINUX_CAPABILITY_VERSION_3` in linux/capability.h.
        const VERSION: u32 = 0x2008_0522;
        let (header, none) = ([VERSION, 0], [0u32; 6]);
        // SAFETY: a header of two numbers and two sets of three numbers (capset(2)) outlive the
        // call, which only reads them. 0 means the calling thread.
        let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is a complete rlimit that outlives the calls. They access nothing else.
        let result = unsafe {
            libc::getrlimit(libc::RLIMIT_NICE, &raw mut limit);
            limit.rlim_cur = 0;
            libc::setrlimit(libc::RLIMIT_NICE, &raw const limit)
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}
