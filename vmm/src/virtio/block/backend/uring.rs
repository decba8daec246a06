//! Files by io_uring: steps are under way together, and the thread goes on meanwhile.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use tracing::warn;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::blocking::Store;
use super::image::{PUNCH, RawImage};
use super::{Done, Executor, Step};
use crate::log::sparsely;
use crate::virtio::block::buffer::Buffer;

/// Steps before the kernel is told: it takes them all in one call.
const BATCH: usize = 64;

/// A step that the kernel works on.
struct Running {
    step: Step,
    /// Bytes of its buffer that are done: files may do less than what was asked for.
    done: usize,
}

/// A ring on a raw image.
pub struct Uring {
    ring: IoUring,
    /// Raised when the kernel has something to tell, while it is armed.
    event: EventFd,
    image: Arc<RawImage>,
    /// By token. The kernel has the addresses of the buffers: they stay here until it is done with them.
    running: Vec<Option<Running>>,
    under_way: usize,
    /// The kernel has not been told of all of them.
    untold: bool,
    /// The event is raised.
    armed: bool,
    done: VecDeque<Done>,
}

impl Uring {
    /// A ring for up to `depth` steps at a time.
    pub fn new(image: Arc<RawImage>, depth: u16) -> io::Result<Self> {
        let mut ring = IoUring::builder().build(u32::from(depth))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::other("the kernel's io_uring is too old"));
        }
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        let running = (0..depth).map(|_| None).collect();
        ring.completion().disable_eventfd();
        Ok(Self {
            ring,
            event,
            image,
            running,
            under_way: 0,
            untold: false,
            armed: false,
            done: VecDeque::new(),
        })
    }

    /// Puts a step, or what is left of it, into the ring.
    fn push(&mut self, token: usize, mut running: Running) {
        let Some(entry) = entry(&self.image, &mut running) else {
            return self.carry_out(token, running);
        };
        let entry = entry.user_data(token as u64);
        assert!(self.running[token].is_none(), "token {token} is used twice");
        self.running[token] = Some(running);
        self.under_way += 1;
        self.untold = true;
        // SAFETY: the buffer that the entry points into is in `running` until the completion has been seen; dropping
        // `self` waits for it. Its heap memory does not move.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // The ring has room for every token.
        pushed.expect("room for as many entries as there are tokens");
    }

    /// What the ring has no word for is done here.
    fn carry_out(&mut self, token: usize, running: Running) {
        let result = match &running.step {
            Step::WriteZeroes(range, unmap) => self.image.write_zeroes(*range, *unmap),
            Step::Read(..) | Step::Write(..) | Step::Flush | Step::Discard(_) => Ok(()),
        };
        self.done.push_back(Done { token, step: running.step, result });
    }

    fn submit(&mut self) {
        // After an error the entries are still in the ring, and the next call takes them. EBUSY and EAGAIN mean that the
        // kernel wants to be rid of completions first.
        while let Err(err) = self.ring.submit() {
            if err.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            sparsely!(warn, %err, "io_uring takes no more");
            if !self.reap() {
                std::thread::yield_now();
            }
            self.untold = false;
        }
    }

    /// Takes what the kernel is done with; false if that is nothing.
    fn reap(&mut self) -> bool {
        let mut again = Vec::new();
        let mut any = false;
        for completion in self.ring.completion() {
            any = true;
            let token = completion.user_data() as usize;
            let mut running = self.running[token].take().expect("a step that was begun");
            self.under_way -= 1;
            match running.advance(completion.result()) {
                None => again.push((token, running)),
                Some(result) => self.done.push_back(Done { token, step: running.step, result }),
            }
        }
        again.into_iter().for_each(|(token, running)| self.push(token, running));
        any
    }
}

/// The ring's word for a step; `None`: there is none, or nothing to do.
fn entry(image: &RawImage, running: &mut Running) -> Option<squeue::Entry> {
    let file = types::Fd(image.file().as_raw_fd());
    let done = running.done;
    match &mut running.step {
        Step::Read(offset, buffer) if !buffer.is_empty() => {
            let rest = &mut buffer.bytes_mut()[done..];
            let entry = opcode::Read::new(file, rest.as_mut_ptr(), rest.len() as u32);
            Some(entry.offset(*offset + done as u64).build())
        }
        Step::Write(offset, buffer) if !buffer.is_empty() => {
            let rest = &buffer.bytes()[done..];
            let entry = opcode::Write::new(file, rest.as_ptr(), rest.len() as u32);
            Some(entry.offset(*offset + done as u64).build())
        }
        Step::Flush => Some(opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build()),
        Step::Discard(range) if range.len_bytes() > 0 => {
            let entry = opcode::Fallocate::new(file, range.len_bytes());
            Some(entry.offset(range.offset_bytes()).mode(PUNCH).build())
        }
        // Which way zeros are written depends on the file system, and is found by trying.
        Step::WriteZeroes(..) | Step::Read(..) | Step::Write(..) | Step::Discard(_) => None,
    }
}

impl Running {
    /// Takes what the kernel says. `None`: it is not all done yet.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let error = || io::Error::from_raw_os_error(-result);
        match (&self.step, result) {
            (_, result) if result == -libc::EINTR || result == -libc::EAGAIN => None,
            (Step::Discard(_), result) if result == -libc::EOPNOTSUPP => Some(Ok(())),
            (_, ..0) => Some(Err(error())),
            // The file is shorter than it was, or has no room.
            (Step::Read(..), 0) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            (Step::Write(..), 0) => Some(Err(io::ErrorKind::WriteZero.into())),
            (Step::Read(_, buffer) | Step::Write(_, buffer), bytes) => {
                self.done += bytes as usize;
                let len = Buffer::len(buffer);
                assert!(self.done <= len, "the kernel did more than it was asked for");
                (self.done == len).then_some(Ok(()))
            }
            (Step::Flush | Step::Discard(_) | Step::WriteZeroes(..), _) => Some(Ok(())),
        }
    }
}

impl Executor for Uring {
    fn add(&mut self, token: usize, step: Step) {
        self.push(token, Running { step, done: 0 });
    }

    fn begin(&mut self) {
        if std::mem::take(&mut self.untold) {
            // What is over when it has begun, as reads from the page cache are, is seen without an event.
            if std::mem::take(&mut self.armed) {
                self.ring.completion().disable_eventfd();
            }
            self.submit();
        }
    }

    fn next_done(&mut self) -> Option<Done> {
        while self.done.is_empty() && self.reap() {
            // What the kernel did only a part of.
            self.begin();
        }
        self.done.pop_front()
    }

    fn arm(&mut self) -> bool {
        if !self.armed && self.under_way > 0 {
            self.ring.completion().enable_eventfd();
            self.armed = true;
            // What came before that the kernel has not raised the event for.
            fence(Ordering::SeqCst);
        }
        !self.done.is_empty() || !self.ring.completion().is_empty()
    }

    fn event(&self) -> Option<&EventFd> {
        Some(&self.event)
    }

    fn batch(&self) -> usize {
        BATCH
    }
}

impl Drop for Uring {
    /// The kernel may still write to the buffers.
    fn drop(&mut self) {
        while self.under_way > 0 {
            if let Err(err) = self.ring.submit_and_wait(1)
                && err.kind() != io::ErrorKind::Interrupted
            {
                warn!(%err, "Waiting for io_uring");
            }
            self.reap();
        }
    }
}
