//! The worker of one queue, on a thread of its own: takes requests, has them carried out, gives the answers.
//!
//! A guard of guest memory is held to take requests and copy what they write, and again to copy what was read and
//! answer; never while the disk works.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::debug;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::backend::{Done, Executor, Step};
use super::buffer::Buffers;
use super::flush::{Answered, Ticket};
use super::job::{Job, Next, PIECE_BYTES_MAX, RANGE_PIECE_BYTES_MAX};
use super::metrics::Kind;
use super::request::{DiskRange, Operation, Request, Status};
use super::state::Disk;
use crate::event_loop::Gate;
use crate::interrupt::VirtioInterrupt;
use crate::log::sparsely;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

const KICK: u32 = 0;
const DONE: u32 = 1;
const SETTLED: u32 = 2;

/// Bytes that one queue has copies of, or zeroes, at a time; requests beyond that wait in the ring.
const HELD_BYTES_MAX: u64 = 16 * PIECE_BYTES_MAX;
/// Passes over the queue before the event loop has its turn: a driver that is as fast as we are would keep us from
/// being stopped.
const PASSES: usize = 64;

/// What a worker is made with.
pub(super) struct Worker {
    disk: Arc<Disk>,
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    index: u16,
    queue: ActiveQueue,
    features: u64,
    executor: Box<dyn Executor>,
    buffers: Buffers,
    /// By token.
    jobs: Vec<Option<Job>>,
    /// Flushes that the executor has, by token.
    tickets: Vec<Option<Ticket>>,
    /// Tokens of flushes that went well, and wait for others that they overlapped.
    settling: Vec<(usize, Answered)>,
    /// Raised when one of these has ended.
    settled: Arc<EventFd>,
    /// Tokens that are not used.
    free: Vec<usize>,
    /// Bytes that the steps of jobs are for.
    held_bytes: u64,
    /// Something was put into the used ring that the driver has not been told of.
    used: bool,
    /// The used ring cannot be written: what is taken now would be lost as well. The next notification tries again.
    lost: bool,
    /// Somebody waits for the end of this worker.
    stop: Arc<AtomicBool>,
    /// Closed while the VM is paused: what was taken ends, and nothing more is.
    gate: Arc<Gate>,
}

impl Worker {
    pub(super) fn new(
        disk: Arc<Disk>,
        view: GuestView,
        interrupt: Arc<dyn VirtioInterrupt>,
        (index, queue): (u16, ActiveQueue),
        features: u64,
        (stop, gate): (Arc<AtomicBool>, Arc<Gate>),
    ) -> io::Result<Self> {
        let depth = queue.queue.size();
        let executor = disk.backend().start(depth)?;
        disk.metrics().io_uring.store(executor.is_uring(), Ordering::Relaxed);
        Ok(Self {
            disk,
            view,
            interrupt,
            index,
            queue,
            features,
            executor,
            buffers: Buffers::default(),
            jobs: (0..depth).map(|_| None).collect(),
            tickets: (0..depth).map(|_| None).collect(),
            settling: Vec::new(),
            settled: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
            free: (0..usize::from(depth)).collect(),
            held_bytes: 0,
            used: false,
            lost: false,
            stop,
            gate,
        })
    }

    /// Works until there is nothing to do but wait, or somebody wants this to end: no step of a request takes long, and
    /// there may be many.
    fn serve(&mut self) {
        self.lost = false;
        for _ in 0..PASSES {
            if self.is_stopping() {
                return;
            }
            #[cfg(test)]
            self.disk.metrics().passes.fetch_add(1, Ordering::Relaxed);
            let steps = self.take();
            let taken = !steps.is_empty();
            self.add(steps);
            let more = self.carry_out();
            let finished = self.finish();
            self.tell();
            if !taken && !more && !finished && !self.executor.arm() && !self.is_wanted() {
                return;
            }
        }
        self.queue.come_back();
    }

    /// Works, and lets a paused VM wait for what was taken. What is in the ring is for later then.
    fn serve_or_wait(&mut self) {
        self.serve();
        let is_busy = self.free.len() < self.jobs.len();
        self.gate.set_busy(is_busy);
        if !is_busy && self.gate.is_closed() {
            self.queue.come_back();
        }
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn add(&mut self, steps: Vec<(usize, Step)>) {
        for (token, step) in steps {
            if let Step::Flush = step {
                self.tickets[token] = Some(self.disk.flushes().begin());
            }
            self.executor.add(token, step);
        }
    }

    /// Begins as many steps as the driver shall wait for; true if there are more.
    fn carry_out(&mut self) -> bool {
        (0..self.executor.batch()).all(|_| !self.is_stopping() && self.executor.begin())
    }

    /// Takes requests out of the ring, under one guard: the first step of each.
    fn take(&mut self) -> Vec<(usize, Step)> {
        let view = self.view.clone();
        let guard = view.memory();
        let memory: &MappedMemory = &guard;
        let (limits, was_broken) = (self.disk.limits(self.features), self.queue.is_broken());
        let mut steps = Vec::new();
        if let Err(err) = self.queue.queue.disable_notification(memory) {
            debug!(%err, "The driver cannot be told to be quiet");
        }
        // What is refused counts as well: under a guard, only so many.
        for _ in 0..self.executor.batch() {
            if !self.takes_more() {
                break;
            }
            let Some(mut chain) = self.queue.pop(memory, &*self.interrupt) else { break };
            let head = chain.head_index();
            match Request::parse(memory, &mut chain, &limits) {
                Ok(request) => steps.extend(self.begin(memory, request)),
                Err(refusal) => {
                    self.disk.metrics().bad_requests.fetch_add(1, Ordering::Relaxed);
                    let id = &self.disk.shape().id;
                    debug!(disk = id, err = %refusal.error, "A request is refused");
                    match refusal.status {
                        Some(status) => self.answer(memory, head, status, refusal.error.status(), 0),
                        None => self.give_back(memory, head, 0),
                    }
                }
            }
        }
        if self.queue.is_broken() && !was_broken {
            self.disk.metrics().broken_queues.fetch_add(1, Ordering::Relaxed);
        }
        steps
    }

    /// The first step of a request; `None`: it is answered already.
    fn begin(&mut self, memory: &MappedMemory, request: Request) -> Option<(usize, Step)> {
        let kind = Kind::from(&request.operation);
        if let Operation::GetId(segments) = &request.operation {
            let serial = self.disk.serial();
            let len = segments.len_bytes();
            let result = segments.write(memory, 0, &serial[..len as usize]).map_err(io::Error::other);
            self.end(memory, &request, kind, result.map(|()| len));
            return None;
        }
        // After a flush that failed nothing may look as if it were on the disk.
        let changes = !matches!(kind, Kind::Read | Kind::GetId);
        if changes && self.disk.has_failed() {
            self.end(memory, &request, kind, Err(io::ErrorKind::ReadOnlyFilesystem.into()));
            return None;
        }
        let token = self.free.pop().expect("a token, as the caller has seen");
        self.held_bytes += held_bytes(&request);
        let job = Job::new(request, self.disk.writes_through(self.features));
        self.go_on(memory, token, job).map(|step| (token, step))
    }

    /// The next step of a job; `None`: it is answered.
    fn go_on(&mut self, memory: &MappedMemory, token: usize, mut job: Job) -> Option<Step> {
        // What was copied is believed, and so a step begun or success told, only if all of it was there.
        let next = job.next(memory, &mut self.buffers);
        let next = next.and_then(|next| memory.check_whole().map(|()| next).map_err(io::Error::other));
        match next {
            Ok(Next::Step(step)) => {
                self.jobs[token] = Some(job);
                Some(step)
            }
            Ok(Next::Finished(len)) => self.end_job(memory, token, &job, Ok(len)),
            Err(err) => self.end_job(memory, token, &job, Err(err)),
        }
    }

    fn end_job(
        &mut self,
        memory: &MappedMemory,
        token: usize,
        job: &Job,
        result: io::Result<u64>,
    ) -> Option<Step> {
        self.free.push(token);
        self.held_bytes -= held_bytes(job.request());
        let kind = Kind::from(&job.request().operation);
        if result.is_ok() {
            self.disk.metrics().took(kind, job.taken().elapsed());
        }
        self.end(memory, job.request(), kind, result);
        None
    }

    /// Answers what is over, and has jobs that go on take their next step. False if nothing was.
    fn finish(&mut self) -> bool {
        let mut done = Vec::new();
        while done.len() < self.jobs.len()
            && let Some(one) = self.executor.next_done()
        {
            done.push(one);
        }
        // 1. What the media say of flushes is known before others are.
        done.retain(|one| !matches!(one.step, Step::Flush) || self.is_over(one.token, &one.result));
        // 2. Those that went well are over when all are that they overlapped.
        let (flushes, settled) = (self.disk.flushes(), &self.settled);
        let over = |&mut (_, answered): &mut _| flushes.is_settled(answered, settled);
        for (token, _) in self.settling.extract_if(.., over) {
            done.push(Done { token, step: Step::Flush, result: self.disk.settled() });
        }
        if done.is_empty() {
            return false;
        }
        // 3. The next steps are begun when the guard is gone.
        let next = self.go_on_with(done);
        self.add(next);
        true
    }

    /// The media have answered a flush; true if that is all there is to wait for.
    fn is_over(&mut self, token: usize, result: &io::Result<()>) -> bool {
        let ticket = self.tickets[token].take().expect("the ticket of a flush that was begun");
        let since = self.jobs[token].as_ref().expect("the job of a step that was begun").since();
        self.disk.flushed(since, result);
        let answered = ticket.end();
        if result.is_ok() {
            self.settling.push((token, answered));
        }
        result.is_err()
    }

    /// Takes notice of what is over, under one guard; the next steps of the jobs that have some.
    fn go_on_with(&mut self, done: Vec<Done>) -> Vec<(usize, Step)> {
        let view = self.view.clone();
        let guard = view.memory();
        let memory: &MappedMemory = &guard;
        let mut steps = Vec::new();
        for Done { token, step, result } in done {
            let job = self.jobs[token].take().expect("the job of a step that was begun");
            let result = result.and_then(|()| job.done(memory, &step));
            if let Some(buffer) = step.into_buffer() {
                self.buffers.put(buffer);
            }
            let next = match result {
                Ok(()) => self.go_on(memory, token, job),
                Err(err) => self.end_job(memory, token, &job, Err(err)),
            };
            steps.extend(next.map(|step| (token, step)));
        }
        steps
    }

    /// Counts and answers a request: with the bytes that went to its buffers, or an error.
    fn end(&mut self, memory: &MappedMemory, request: &Request, kind: Kind, result: io::Result<u64>) {
        let metrics = self.disk.metrics();
        metrics.finished(kind, result.is_ok());
        let (status, len) = match result {
            Ok(len) => {
                metrics.transferred(kind, transferred_bytes(request));
                (Status::Ok, len)
            }
            Err(err) => {
                let (disk, operation) = (&self.disk.shape().id, kind.as_str());
                sparsely!(warn, disk, operation, %err, "A request of the guest has failed");
                (Status::IoError, 0)
            }
        };
        self.answer(memory, request.head, request.status, status, len);
    }

    /// Writes the status, and gives the chain back: `len` bytes and the status were written.
    fn answer(&mut self, memory: &MappedMemory, head: u16, at: GuestAddress, status: Status, len: u64) {
        let len = match memory.write_obj(status.code(), at) {
            // A chain has less than 2^32 bytes, its status among them.
            Ok(()) => u32::try_from(len + 1).unwrap_or(u32::MAX),
            Err(err) => {
                self.disk.metrics().bad_requests.fetch_add(1, Ordering::Relaxed);
                debug!(disk = self.disk.shape().id, %err, "A status byte is not in memory");
                0
            }
        };
        self.give_back(memory, head, len);
    }

    fn give_back(&mut self, memory: &MappedMemory, head: u16, len: u32) {
        let given = self.queue.give_back(memory, head, len);
        self.used |= given;
        self.lost |= !given;
    }

    /// Interrupts, if there is something new and the driver wants to know.
    fn tell(&mut self) {
        if !std::mem::take(&mut self.used) {
            return;
        }
        let tell = self.queue.queue.needs_notification(&*self.view.memory()).unwrap_or(true);
        if tell && let Err(err) = self.interrupt.signal_queue(self.index) {
            sparsely!(warn, disk = self.disk.shape().id, %err, "A disk cannot interrupt");
        }
    }

    fn takes_more(&self) -> bool {
        !self.gate.is_closed() && !self.free.is_empty() && self.held_bytes < HELD_BYTES_MAX && !self.lost
    }

    /// Lets the driver notify again; true if it has added something that it will not notify of.
    fn is_wanted(&mut self) -> bool {
        if !self.takes_more() {
            // The next answer brings us back, or a notification.
            return false;
        }
        self.queue.wait_for_more(&self.view.memory())
    }
}

/// What the step of a request is for, at most.
fn held_bytes(request: &Request) -> u64 {
    let longest = |lengths: &mut dyn Iterator<Item = u64>| lengths.max().unwrap_or(0);
    match &request.operation {
        Operation::Read(range, _) | Operation::Write(range, _) => range.len_bytes().min(PIECE_BYTES_MAX),
        Operation::Discard(ranges) => {
            longest(&mut ranges.iter().map(DiskRange::len_bytes)).min(RANGE_PIECE_BYTES_MAX)
        }
        Operation::WriteZeroes(ranges) => {
            longest(&mut ranges.iter().map(|(range, _)| range.len_bytes())).min(RANGE_PIECE_BYTES_MAX)
        }
        Operation::Flush | Operation::GetId(_) => 0,
    }
}

/// What a request moves between disk and guest.
fn transferred_bytes(request: &Request) -> u64 {
    match &request.operation {
        Operation::Read(range, _) | Operation::Write(range, _) => range.len_bytes(),
        _ => 0,
    }
}

impl Drop for Worker {
    /// What the media say of a flush is for others as well, though its own driver does not wait for it any more.
    fn drop(&mut self) {
        self.gate.set_busy(false);
        for Done { token, step, result } in self.executor.drain() {
            if let (Step::Flush, Some(job)) = (step, &self.jobs[token]) {
                self.disk.flushed(job.since(), &result);
            }
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(KICK, ops);
        let events = [(Some(&*self.settled), SETTLED), (self.executor.event(), DONE)];
        for (event, data) in events {
            if let Some(event) = event
                && let Err(err) = ops.add(Events::with_data(event, data, EventSet::IN))
            {
                sparsely!(error, ?err, disk = self.disk.shape().id, "Cannot wait for a disk");
            }
        }
        self.serve_or_wait();
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        // Reading an event fails only when somebody else has seen it.
        match events.data() {
            KICK => self.queue.clear_kick(),
            SETTLED => {
                let _ = self.settled.read();
            }
            _ => {
                let _ = self.executor.event().map(|event| event.read());
            }
        }
        self.serve_or_wait();
    }
}
