//! Pressure triggers of the kernel: descriptors that become ready when tasks wait for memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::event::PollFlags;

/// Alternative requests for each trigger, in order of preference.
///
/// One trigger fires if some task has waited for 50 ms in 500 ms, and the other if all tasks have
/// waited for 15 ms. Linux accepts no window below 500 ms. Without CAP_SYS_RESOURCE, it accepts
/// only multiples of 2 s, and no trigger at all before 6.5 (psi_trigger_create in
/// kernel/sched/psi.c).
const REQUESTS: [[&[u8]; 2]; 2] = [
    [b"some 50000 500000\0", b"some 200000 2000000\0"],
    [b"full 15000 500000\0", b"full 60000 2000000\0"],
];

pub(crate) const TRIGGERS: usize = REQUESTS.len();

/// Time after which the agent requests a lost trigger again.
const RETRY_MS: u64 = 10_000;

/// Triggers that the kernel has accepted. A missing trigger is requested again later.
#[derive(Debug)]
pub(crate) struct Triggers {
    path: PathBuf,
    files: [Option<File>; TRIGGERS],
    retry_ms: u64,
}

impl Triggers {
    /// Registers the triggers with the pressure file below `root`, which is /proc outside of tests.
    /// Returns an error if no trigger can be registered.
    pub(crate) fn register(root: &Path, now_ms: u64) -> io::Result<Self> {
        let mut triggers = Triggers {
            path: root.join("pressure/memory"),
            files: [None, None],
            retry_ms: u64::MAX,
        };
        let result = triggers.register_missing(now_ms);
        if triggers.files.iter().all(Option::is_none) {
            result?;
        }
        Ok(triggers)
    }

    fn register_missing(&mut self, now_ms: u64) -> io::Result<()> {
        let mut result = Ok(());
        for (file, requests) in self.files.iter_mut().zip(REQUESTS) {
            if file.is_none() {
                match first_granted(requests, |request| register_one(&self.path, request)) {
                    Ok(granted) => *file = Some(granted),
                    Err(error) => result = Err(error),
                }
            }
        }
        self.retry_ms = if result.is_ok() { u64::MAX } else { now_ms.saturating_add(RETRY_MS) };
        result
    }

    /// Descriptors to poll for POLLPRI.
    pub(crate) fn fds(&self) -> [Option<BorrowedFd<'_>>; TRIGGERS] {
        self.files.each_ref().map(|file| file.as_ref().map(AsFd::as_fd))
    }

    /// Handles the events of a poll, and returns true if a trigger has fired. Triggers that the
    /// kernel has removed are closed and requested again later.
    pub(crate) fn fired(&mut self, events: [PollFlags; TRIGGERS], now_ms: u64) -> bool {
        for (file, events) in self.files.iter_mut().zip(events) {
            if events.intersects(PollFlags::ERR | PollFlags::NVAL) {
                *file = None;
                self.retry_ms = now_ms.saturating_add(RETRY_MS);
            }
        }
        if now_ms >= self.retry_ms {
            // An error is ignored, because reports still follow at the usual intervals.
            let _ = self.register_missing(now_ms);
        }
        events
            .iter()
            .any(|events| events.contains(PollFlags::PRI) && !events.contains(PollFlags::ERR))
    }
}

/// Returns the result of the first of `requests` that the kernel accepts.
fn first_granted<T>(
    requests: [&[u8]; 2],
    mut register: impl FnMut(&[u8]) -> io::Result<T>,
) -> io::Result<T> {
    let [best, other] = requests;
    match register(best) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied
            ) =>
        {
            register(other)
        }
        result => result,
    }
}

/// Registers a trigger with a single write. The trigger exists while the file is open.
fn register_one(path: &Path, request: &[u8]) -> io::Result<File> {
    let mut file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let written = file.write(request)?;
    if written == request.len() { Ok(file) } else { Err(io::ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    const NONE: PollFlags = PollFlags::empty();

    #[test]
    fn long_window_is_requested_after_a_refusal_of_the_short_one() {
        let requests = |refusal: Option<io::ErrorKind>| {
            let mut requests = Vec::new();
            let result = first_granted(REQUESTS[0], |request| {
                requests.push(request.to_vec());
                refusal
                    .filter(|_| request == REQUESTS[0][0])
                    .map_or(Ok(()), |kind| Err(kind.into()))
            });
            (requests.len(), result.map_err(|error| error.kind()))
        };
        assert_eq!(requests(None), (1, Ok(())));
        assert_eq!(requests(Some(io::ErrorKind::InvalidInput)), (2, Ok(())));
        assert_eq!(requests(Some(io::ErrorKind::PermissionDenied)), (2, Ok(())));
        assert_eq!(
            requests(Some(io::ErrorKind::OutOfMemory)),
            (1, Err(io::ErrorKind::OutOfMemory))
        );
    }

    #[test]
    fn windows_are_accepted_by_linux() {
        for (requests, what) in REQUESTS.iter().zip(["some", "full"]) {
            for (request, privileged) in requests.iter().zip([true, false]) {
                let text = std::str::from_utf8(request).expect("ASCII").trim_end_matches('\0');
                let words: Vec<&str> = text.split(' ').collect();
                let [kind, stall, window] = words[..] else { panic!("{text}") };
                let (stall_us, window_us): (u64, u64) =
                    (stall.parse().expect("number"), window.parse().expect("number"));
                assert_eq!(kind, what);
                assert!(
                    stall_us > 0
                        && stall_us <= window_us
                        && (500_000..=10_000_000).contains(&window_us)
                );
                assert!(privileged || window_us % 2_000_000 == 0, "{text}");
            }
        }
    }

    #[test]
    fn lost_trigger_is_requested_again_later() {
        let tree = Tree::new(&[("pressure/memory", "")]);
        let mut triggers = Triggers::register(tree.path(), 0).expect("two files");
        assert!(triggers.fired([NONE, PollFlags::PRI], 1_000), "either of them");
        assert!(
            !triggers.fired([PollFlags::ERR | PollFlags::PRI, NONE], 2_000),
            "an error does not report a stall"
        );
        assert!(triggers.fds()[0].is_none() && triggers.fds()[1].is_some());
        triggers.fired([NONE; TRIGGERS], 11_999);
        assert!(triggers.fds()[0].is_none(), "not at once");
        triggers.fired([NONE; TRIGGERS], 12_000);
        assert!(triggers.fds()[0].is_some());
        tree.remove("pressure/memory");
        triggers.fired([PollFlags::NVAL; TRIGGERS], 13_000);
        triggers.fired([NONE; TRIGGERS], 23_000);
        assert!(triggers.fds().iter().all(Option::is_none), "not there");
        tree.put("pressure/memory", "");
        triggers.fired([NONE; TRIGGERS], 33_000);
        assert!(triggers.fds().iter().all(Option::is_some));
    }

    #[test]
    fn kernel_without_pressure_information_has_no_triggers() {
        let error = Triggers::register(Path::new("/missing"), 0).expect_err("none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
