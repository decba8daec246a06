//! I/O to raw images through io_uring. Several steps are in flight while the thread continues.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use io_uring::register::Restriction;
use io_uring::types::Fixed;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use tracing::warn;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::direct::is_refusal;
use rustix::fs::FallocateFlags;

use super::image::{PUNCH, RangeInUse, RawImage, ZERO};
use super::range_locks::RangeGuard;
use super::{Done, Executor, Step};
use crate::disk::buffer::{Buffer, Buffers};
use crate::disk::range::DiskRange;

/// Number of steps that are queued before one system call submits all of them to the kernel.
const BATCH: usize = 64;
/// Length of each write where a range is zeroed by writing zeros.
const ZEROS_BYTES: usize = 1 << 20;
/// Operations of a ring.
const OPERATIONS: [u8; 4] =
    [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
/// The image is the only registered file of its ring.
const IMAGE: Fixed = Fixed(0);
/// `IORING_UNREGISTER_FILES` of linux/io_uring.h.
const UNREGISTER_FILES: u8 = 3;
/// Number of consecutive submissions that the kernel may refuse before the ring is abandoned.
const SUBMITS_MAX: u32 = 1000;
/// Maximum number of retries of one step that the kernel defers.
const RETRIES_MAX: u32 = 100;

/// Method of zeroing a range. The VMM tries the methods in turn, because support depends on the
/// file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZeroMethod {
    /// Deallocate the blocks of the range.
    Punch,
    /// Let the file system mark the blocks as zero.
    Zero,
    Write,
}

/// Step that was passed to the kernel.
struct Running {
    step: Step,
    /// Completed bytes of the step. A transfer may be shorter than requested.
    done: usize,
    /// Method of zeroing, for a step that writes zeros.
    method: ZeroMethod,
    retries: u32,
    /// Lock of the range that the step changes. The lock excludes unaligned steps.
    guard: Option<RangeGuard>,
}

/// Ring for a raw image.
pub struct Uring {
    ring: IoUring,
    /// Raised on completions while the ring is armed.
    event: Arc<EventFd>,
    image: Arc<RawImage>,
    /// Steps in flight, by token. The kernel uses their buffers, so the steps are kept here until
    /// they are completed.
    running: Vec<Option<Running>>,
    in_flight: usize,
    /// Set if some of these steps were not submitted to the kernel yet.
    has_unsubmitted: bool,
    /// Set if completions currently raise the event.
    armed: bool,
    done: VecDeque<Done>,
    /// Steps to be executed by blocking calls, one on each call of `begin`: unaligned steps, steps
    /// whose range another step is changing, and all steps after the ring was abandoned.
    deferred: VecDeque<(usize, Step)>,
    /// Buffer of zeros to write, allocated on first use.
    zeros: Option<Buffer>,
    /// Set if the kernel no longer accepts steps from the ring.
    is_given_up: bool,
    /// Number of flush completions whose result a test replaces with EINTR.
    #[cfg(test)]
    interruptions: u32,
}

impl Uring {
    /// Creates a ring for up to `depth` steps in flight.
    pub fn new(image: Arc<RawImage>, depth: u16) -> io::Result<Self> {
        let mut ring = IoUring::builder().setup_r_disabled().build(u32::from(depth))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !OPERATIONS.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::other("the kernel's io_uring lacks a required operation"));
        }
        let event = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        restrict(&ring, &image)?;
        let running = (0..depth).map(|_| None).collect();
        ring.completion().disable_eventfd();
        Ok(Self {
            ring,
            event,
            image,
            running,
            in_flight: 0,
            has_unsubmitted: false,
            armed: false,
            done: VecDeque::new(),
            deferred: VecDeque::new(),
            zeros: None,
            is_given_up: false,
            #[cfg(test)]
            interruptions: 0,
        })
    }

    /// Adds a step, or the rest of a step, to the ring.
    fn push(&mut self, token: usize, mut running: Running) {
        if !self.image.is_aligned(&running.step) {
            self.deferred.push_back((token, running.step));
            return;
        }
        if running.guard.is_none() {
            match self.image.lock_aligned(&running.step, &self.event) {
                Ok(guard) => running.guard = guard,
                Err(RangeInUse) => {
                    self.deferred.push_back((token, running.step));
                    return;
                }
            }
        }
        let Some(entry) = self.entry(&mut running) else {
            self.done.push_back(Done { token, step: running.step, result: Ok(()) });
            return;
        };
        let entry = entry.user_data(token as u64);
        assert!(self.running[token].is_none(), "token {token} was used twice");
        self.running[token] = Some(running);
        self.in_flight += 1;
        self.has_unsubmitted = true;
        // SAFETY: the entry points either into a buffer in `running`, which is kept until the step
        // is completed, or into the zeros in `self`. Dropping `self` waits for all completions.
        // Both are on the heap and do not move.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The ring has room for every token.
        pushed.expect("room for as many entries as there are tokens");
    }

    /// Ring entry for the rest of a step. `None` if the step is complete.
    fn entry(&mut self, running: &mut Running) -> Option<squeue::Entry> {
        let done = running.done;
        let allocate = |range: &DiskRange, mode: FallocateFlags| {
            let entry = opcode::Fallocate::new(IMAGE, range.len_bytes());
            Some(entry.offset(range.offset_bytes()).mode(mode.bits() as i32).build())
        };
        match &mut running.step {
            Step::Read(offset, buffer) if !buffer.is_empty() => {
                let rest = &mut buffer.bytes_mut()[done..];
                let entry = opcode::Read::new(IMAGE, rest.as_mut_ptr(), rest.len() as u32);
                Some(entry.offset(*offset + done as u64).build())
            }
            Step::Write(offset, buffer) if !buffer.is_empty() => {
                let rest = &buffer.bytes()[done..];
                let entry = opcode::Write::new(IMAGE, rest.as_ptr(), rest.len() as u32);
                Some(entry.offset(*offset + done as u64).build())
            }
            Step::Flush => {
                Some(opcode::Fsync::new(IMAGE).flags(types::FsyncFlags::DATASYNC).build())
            }
            Step::Discard(range) if range.len_bytes() > 0 => allocate(range, PUNCH),
            Step::WriteZeroes(range, _) if range.len_bytes() > 0 => match running.method {
                ZeroMethod::Punch => allocate(range, PUNCH),
                ZeroMethod::Zero => allocate(range, ZERO),
                ZeroMethod::Write => {
                    // A new buffer is zeroed, and this one is never written to.
                    let zeros =
                        self.zeros.get_or_insert_with(|| Buffers::default().take(ZEROS_BYTES));
                    let len = (range.len_bytes() - done as u64).min(ZEROS_BYTES as u64);
                    let entry = opcode::Write::new(IMAGE, zeros.bytes().as_ptr(), len as u32);
                    Some(entry.offset(range.offset_bytes() + done as u64).build())
                }
            },
            Step::Read(..) | Step::Write(..) | Step::Discard(_) | Step::WriteZeroes(..) => None,
        }
    }

    /// Submits all entries to the kernel. After an error, the entries remain in the ring, and the
    /// next call submits them again. EBUSY and EAGAIN mean that completions must be reaped first.
    fn submit(&mut self) {
        for _ in 0..SUBMITS_MAX {
            match self.ring.submit() {
                Ok(_) => return,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if self.reap() => {}
                Err(_) => std::thread::yield_now(),
            }
        }
        self.give_up();
    }

    /// Abandons the ring. No later call uses it.
    fn give_up(&mut self) {
        // The thread is named after its queue.
        let queue = std::thread::current().name().unwrap_or_default().to_owned();
        warn!(queue, "io_uring failed; the queue transfers one request at a time from now on");
        // 1. Wait for the steps that the kernel has accepted, and process their results.
        while self.in_flight > self.ring.submission().len() {
            let completed = self.completed();
            if completed.is_empty() {
                std::thread::yield_now();
            }
            for (token, mut running, result) in completed {
                match running.advance(result) {
                    Some(result) if !self.is_refused(&running.step, &result) => {
                        self.done.push_back(Done { token, step: running.step, result });
                    }
                    _ => self.deferred.push_back((token, running.step)),
                }
            }
        }
        // 2. Defer the steps that the kernel has not accepted, because it will never start them.
        //    Blocking calls execute them from their beginning.
        for (token, slot) in self.running.iter_mut().enumerate() {
            if let Some(running) = slot.take() {
                self.deferred.push_back((token, running.step));
            }
        }
        (self.in_flight, self.has_unsubmitted, self.is_given_up) = (0, false, true);
    }

    /// Executes one deferred step, unless another step is changing the same blocks. Returns true if
    /// more deferred steps can be executed.
    fn carry_out_deferred(&mut self) -> bool {
        let Some((_, step)) = self.deferred.front_mut() else { return false };
        let Some(result) = self.image.carry_out_unaligned(step, &self.event) else { return false };
        let (token, step) = self.deferred.pop_front().expect("the step that was executed");
        self.done.push_back(Done { token, step, result });
        !self.deferred.is_empty()
    }

    /// Returns true if a step failed but may succeed with another alignment.
    fn is_refused(&self, step: &Step, result: &io::Result<()>) -> bool {
        is_refusal(result) && self.image.may_refuse(step)
    }

    /// Returns the steps that the kernel has completed.
    fn completed(&mut self) -> Vec<(usize, Running, i32)> {
        let completions = self.ring.completion();
        let running = &mut self.running;
        let completed: Vec<_> = completions
            .map(|completion| {
                let token = completion.user_data() as usize;
                (token, running[token].take().expect("a step in progress"), completion.result())
            })
            .collect();
        self.in_flight -= completed.len();
        #[cfg(test)]
        let completed = self.interrupted(completed);
        completed
    }

    /// Processes completions. Returns false if no step has completed.
    fn reap(&mut self) -> bool {
        let completed = self.completed();
        let any = !completed.is_empty();
        for (token, mut running, result) in completed {
            match running.advance(result) {
                None => self.push(token, running),
                // Repeats the whole step. The content of its blocks is undefined for the guest
                // until the request is complete.
                Some(result) if self.is_refused(&running.step, &result) => {
                    self.deferred.push_back((token, running.step));
                }
                Some(result) => self.done.push_back(Done { token, step: running.step, result }),
            }
        }
        any
    }
}

/// Limits a disabled ring to [`OPERATIONS`] on the image, and enables it. Seccomp filters do not
/// see the operations of a ring (io_uring_register(2), `IORING_REGISTER_RESTRICTIONS`).
fn restrict(ring: &IoUring, image: &RawImage) -> io::Result<()> {
    ring.submitter().register_files(&[image.file().as_raw_fd()])?;
    let mut restrictions = vec![
        Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()),
        Restriction::register_op(UNREGISTER_FILES),
    ];
    restrictions.extend(OPERATIONS.map(Restriction::sqe_op));
    // Before Linux 5.17, these calls wait for the ring, and a signal may interrupt the wait.
    retry(|| ring.submitter().register_restrictions(&mut restrictions))?;
    retry(|| ring.submitter().register_enable_rings())
}

/// Repeats a call that a signal interrupts.
fn retry(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

impl Running {
    fn new(step: Step, unmaps: bool) -> Self {
        let method = if unmaps { ZeroMethod::Punch } else { ZeroMethod::Zero };
        Self { step, done: 0, method, retries: 0, guard: None }
    }

    /// Processes the kernel's result. Returns `None` if the step is not complete.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let error = || Some(Err(io::Error::from_raw_os_error(-result)));
        let len = match &self.step {
            Step::Read(_, buffer) | Step::Write(_, buffer) => buffer.len(),
            Step::WriteZeroes(range, _) => range.len_bytes() as usize,
            Step::Flush | Step::Discard(_) => 0,
        };
        match (&self.step, result) {
            (_, result) if result == -libc::EINTR || result == -libc::EAGAIN => {
                self.retries += 1;
                if self.retries < RETRIES_MAX { None } else { error() }
            }
            // Ignoring a discard is allowed, because it is a hint (5.2.6.2). Zeroing is mandatory.
            (Step::Discard(_), result) if result == -libc::EOPNOTSUPP => Some(Ok(())),
            (Step::WriteZeroes(..), result)
                if result == -libc::EOPNOTSUPP && self.method != ZeroMethod::Write =>
            {
                self.method = if self.method == ZeroMethod::Punch {
                    ZeroMethod::Zero
                } else {
                    ZeroMethod::Write
                };
                None
            }
            (_, ..0) => error(),
            (Step::Flush | Step::Discard(_), _) => Some(Ok(())),
            (Step::WriteZeroes(..), _) if self.method != ZeroMethod::Write => Some(Ok(())),
            // The file was truncated, or its file system is full.
            (Step::Read(..), 0) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            (Step::Write(..) | Step::WriteZeroes(..), 0) => {
                Some(Err(io::ErrorKind::WriteZero.into()))
            }
            (Step::Read(..) | Step::Write(..) | Step::WriteZeroes(..), bytes) => {
                self.done += bytes as usize;
                assert!(self.done <= len, "the kernel transferred more than requested");
                (self.done == len).then_some(Ok(()))
            }
        }
    }
}

impl Executor for Uring {
    fn add(&mut self, token: usize, step: Step) {
        if self.is_given_up {
            self.deferred.push_back((token, step));
            return;
        }
        let unmaps = matches!(step, Step::WriteZeroes(_, unmap) if self.image.unmaps(unmap));
        self.push(token, Running::new(step, unmaps));
    }

    fn begin(&mut self) -> bool {
        if std::mem::take(&mut self.has_unsubmitted) {
            // Steps that complete immediately, for example reads from the page cache, need no
            // event.
            if std::mem::take(&mut self.armed) {
                self.ring.completion().disable_eventfd();
            }
            self.submit();
        }
        self.carry_out_deferred()
    }

    fn next_done(&mut self) -> Option<Done> {
        while self.done.is_empty() && self.reap() {
            // Repeats steps that the kernel refused, and continues partially completed steps.
            self.begin();
        }
        self.done.pop_front()
    }

    fn arm(&mut self) -> bool {
        if !self.armed && self.in_flight > 0 {
            self.ring.completion().enable_eventfd();
            self.armed = true;
            // Ensures that the check below sees completions that raised no event.
            fence(Ordering::SeqCst);
        }
        // A deferred step that must wait for other steps has registered the event.
        self.carry_out_deferred();
        !self.done.is_empty() || !self.ring.completion().is_empty()
    }

    fn event(&self) -> &EventFd {
        &self.event
    }

    fn batch(&self) -> usize {
        BATCH
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up
    }

    /// Completes all steps, because the kernel may still write to their buffers.
    fn drain(&mut self) -> Vec<Done> {
        // 1. Start the steps that were added but not started, because they cannot be removed from
        //    the ring.
        if !self.is_given_up {
            self.begin();
        }
        while self.in_flight > 0 {
            // Submits repeated flushes. Abandons the ring if the kernel refuses them.
            self.submit();
            if self.in_flight == 0 {
                break;
            }
            if let Err(err) = self.ring.submit_and_wait(1)
                && err.kind() != io::ErrorKind::Interrupted
            {
                std::thread::yield_now();
            }
            // 2. Drop the rest of a partially completed step. Repeat an interrupted flush, because
            //    its result matters to all queues, and an interruption is not a media failure.
            for (token, mut running, result) in self.completed() {
                let result = match running.advance(result) {
                    None if matches!(running.step, Step::Flush) => {
                        self.push(token, running);
                        continue;
                    }
                    result => result.unwrap_or_else(|| Err(io::ErrorKind::Interrupted.into())),
                };
                self.done.push_back(Done { token, step: running.step, result });
            }
        }
        // 3. Execute flushes that were deferred after an interruption. They never wait for other
        //    steps, because a flush changes no blocks.
        self.deferred.retain(|(_, step)| matches!(step, Step::Flush));
        while self.carry_out_deferred() {}
        self.done.drain(..).collect()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.drain();
        // The kernel frees a closed ring in the background, and the image would stay open and
        // locked until then. An error means that the image is released a moment later.
        let _ = self.ring.submitter().unregister_files();
    }
}

impl AsRawFd for Uring {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

#[cfg(test)]
#[path = "uring_tests.rs"]
mod tests;
