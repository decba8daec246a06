//! The worker of one queue, on its own thread. The worker takes requests from the queue,
//! executes them, and answers them.
//!
//! Requests are executed by blocking calls ([`super::calls`]) or by an io_uring ([`super::ring`]).
//! The worker holds one guard of guest memory while it takes requests and copies data to write. It
//! takes another guard to copy data that was read and to answer. It holds no guard during disk I/O.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::debug;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::flush::{Answered, Ticket};
use super::job::{Job, Next, PIECE_BYTES_MAX, RANGE_PIECE_BYTES_MAX};
use super::metrics::Kind;
use super::request::{Operation, Request, Status};
use super::ring::{IdleExecutor, Ring};
use super::state::Disk;
use crate::disk::Step;
use crate::disk::buffer::Buffers;
use crate::disk::range::DiskRange;
use crate::event_loop::Gate;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

const KICK: u32 = 0;
const DONE: u32 = 1;
const FLUSH_ENDED: u32 = 2;
const RETRY: u32 = 3;

/// Limit for the bytes that the unanswered requests of a queue copy or zero at a time. A queue at
/// this limit takes no more requests, which then wait in the ring. The last request may exceed the
/// limit by less than one piece. Jobs that wait for space do not count, because only a later
/// discard may make space for them.
pub(super) const HELD_BYTES_MAX: u64 = 16 * PIECE_BYTES_MAX;
/// Number of passes over the queue before the worker returns to its event loop. Without a limit, a
/// driver that adds requests as fast as they are served would prevent the worker from being
/// stopped.
const PASSES: usize = 64;

pub(super) struct Worker {
    pub(super) disk: Arc<Disk>,
    pub(super) view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    index: u16,
    pub(super) queue: ActiveQueue,
    features: u64,
    /// `None` if the worker executes steps by blocking calls.
    ring: Option<Ring>,
    /// Steps that wait for execution by blocking calls, in order.
    pub(super) next: VecDeque<(Job, Step)>,
    /// Jobs that wait until the pool has space. They hold no copies of their data.
    parked: Vec<Job>,
    /// Formerly parked jobs that will be retried, in order.
    retries: VecDeque<Job>,
    /// Signaled when the parked jobs must be retried.
    retry: Arc<EventFd>,
    pub(super) buffers: Buffers,
    /// Jobs whose flush succeeded. They wait until all flushes that overlapped with it have ended.
    awaiting_flushes: Vec<(Job, Answered)>,
    /// Signaled after the end of a flush for which jobs in `awaiting_flushes` wait.
    flush_ended: Arc<EventFd>,
    /// Number of requests that were taken but not yet answered. At most `depth`.
    open: u16,
    depth: u16,
    /// Bytes that the open requests, except waiting ones, copy or zero at a time. Limited by
    /// [`HELD_BYTES_MAX`].
    held_bytes: u64,
    /// True if the driver must still be notified of entries in the used ring.
    pub(super) used: bool,
    is_interrupt_due: bool,
    /// True after the used ring could not be written. The worker takes no requests until the next
    /// notification, because their answers would be lost.
    lost: bool,
    /// True while a reset waits for this worker to end.
    stop: Arc<AtomicBool>,
    /// Closed while the VM is paused. The worker then completes requests in progress but takes no
    /// new ones.
    gate: Arc<Gate>,
    /// Receives the executor of `ring` when the worker ends.
    idle_executor: IdleExecutor,
}

#[expect(clippy::large_enum_variant, reason = "a box would cost more than the move")]
pub(super) enum TakenRequest {
    /// A request was begun. Includes its first step.
    Started(Job, Step),
    /// A request was refused or answered immediately.
    Answered,
    /// No request is available, or the worker may not take one.
    Nothing,
}

impl Worker {
    pub(super) fn new(
        disk: Arc<Disk>,
        view: GuestView,
        interrupt: Arc<dyn VirtioInterrupt>,
        (index, queue): (u16, ActiveQueue),
        features: u64,
        (stop, gate, idle_executor): (Arc<AtomicBool>, Arc<Gate>, IdleExecutor),
    ) -> io::Result<Self> {
        let depth = queue.queue.size();
        let flush_ended = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let ring = idle_executor.take().map(|executor| Ring::new(executor, depth));
        disk.metrics().io_uring.fetch_and(ring.is_some(), Ordering::Relaxed);
        Ok(Self {
            disk,
            view,
            interrupt,
            index,
            queue,
            features,
            ring,
            next: VecDeque::new(),
            parked: Vec::new(),
            retries: VecDeque::new(),
            retry: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
            buffers: Buffers::default(),
            awaiting_flushes: Vec::new(),
            flush_ended,
            open: 0,
            depth,
            held_bytes: 0,
            used: false,
            is_interrupt_due: false,
            lost: false,
            stop,
            gate,
            idle_executor,
        })
    }

    /// Executes steps until nothing is left to do or a reset is waiting. The stop flag is checked
    /// often, because requests have short steps but may have many of them.
    fn serve(&mut self) {
        self.lost = false;
        let mut ring = self.ring.take();
        let is_over = (0..PASSES).any(|_| {
            #[cfg(test)]
            self.disk.metrics().passes.fetch_add(1, Ordering::Relaxed);
            self.is_stopping()
                || !match &mut ring {
                    Some(ring) => self.pass_by_ring(ring),
                    None => self.pass_by_calls(),
                }
        });
        self.ring = ring;
        if !is_over {
            self.queue.reschedule();
        }
    }

    /// Serves the queue, and then reports to the gate whether requests are still open. While the
    /// gate is closed, available requests remain in the queue.
    fn serve_or_wait(&mut self) {
        self.serve();
        // Parked jobs do not delay a pause of the VM, because they may wait for its end.
        let is_busy = usize::from(self.open) > self.parked.len();
        self.gate.set_busy(is_busy);
        if !is_busy && self.gate.is_closed() {
            self.queue.reschedule();
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Disables notifications, because the worker polls the queue until it is empty.
    pub(super) fn silence(&mut self, memory: &MappedMemory) {
        if let Err(err) = self.queue.queue.disable_notification(memory) {
            debug!(disk = self.disk.shape().id, %err, "Cannot disable queue notifications");
        }
    }

    pub(super) fn take(&mut self, memory: &MappedMemory) -> TakenRequest {
        if !self.takes_more() {
            return TakenRequest::Nothing;
        }
        let was_broken = self.queue.is_broken();
        let Some(mut chain) = self.queue.pop(memory, &*self.interrupt) else {
            if self.queue.is_broken() && !was_broken {
                self.disk.metrics().broken_queues.fetch_add(1, Ordering::Relaxed);
            }
            return TakenRequest::Nothing;
        };
        let head = chain.head_index();
        match Request::parse(memory, &mut chain, &self.disk.limits(self.features)) {
            Ok(request) => match self.begin(memory, request) {
                Some((job, step)) => TakenRequest::Started(job, step),
                None => TakenRequest::Answered,
            },
            Err(refusal) => {
                self.disk.metrics().bad_requests.fetch_add(1, Ordering::Relaxed);
                let id = &self.disk.shape().id;
                debug!(disk = id, err = %refusal.error, "Request refused");
                match refusal.status {
                    Some(status) => self.answer(memory, head, status, refusal.error.status(), 0),
                    None => self.give_back(memory, head, 0),
                }
                TakenRequest::Answered
            }
        }
    }

    /// Begins a request and returns its first step. Returns `None` if the request was answered
    /// immediately.
    fn begin(&mut self, memory: &MappedMemory, request: Request) -> Option<(Job, Step)> {
        let (kind, taken) = (Kind::from(&request.operation), Instant::now());
        if let Operation::GetId(segments) = &request.operation {
            let serial = self.disk.serial();
            let len = segments.len_bytes();
            let result =
                segments.write(memory, 0, &serial[..len as usize]).map_err(io::Error::other);
            self.end(memory, &request, kind, taken, result.map(|()| len));
            return None;
        }
        // After a failed flush, no later write may be reported as durable.
        let changes = !matches!(kind, Kind::Read | Kind::GetId);
        if changes && self.disk.has_failed() {
            self.end(memory, &request, kind, taken, Err(io::ErrorKind::ReadOnlyFilesystem.into()));
            return None;
        }
        self.open += 1;
        self.held_bytes += held_bytes(&request);
        self.continue_job(memory, Job::new(request))
    }

    /// Returns the job with its next step. Returns `None` if the request was completed and
    /// answered.
    fn continue_job(&mut self, memory: &MappedMemory, mut job: Job) -> Option<(Job, Step)> {
        // If a page of the copied memory was lost, the request fails: no further step begins, and
        // no success is reported.
        let writes_through = || self.disk.writes_through(self.features);
        let next = job.next(memory, &mut self.buffers, writes_through);
        let next =
            next.and_then(|next| memory.check_whole().map(|()| next).map_err(io::Error::other));
        match next {
            Ok(Next::Step(step)) => return Some((job, step)),
            Ok(Next::Finished(len)) => self.end_job(memory, &job, Ok(len)),
            Err(err) => self.end_job(memory, &job, Err(err)),
        }
        None
    }

    /// Copies the result of a step to the guest and returns the job's next step. Returns `None` if
    /// the request was completed and answered.
    pub(super) fn finish(
        &mut self,
        memory: &MappedMemory,
        job: Job,
        step: Step,
        result: io::Result<()>,
    ) -> Option<(Job, Step)> {
        let result = result.and_then(|()| job.done(memory, &step));
        if let Some(buffer) = step.into_buffer() {
            self.buffers.put(buffer);
        }
        match result {
            Ok(()) => self.continue_job(memory, job),
            Err(err) => {
                self.end_job(memory, &job, Err(err));
                None
            }
        }
    }

    /// Parks a job if its step found no space and may wait. Otherwise, returns it with the result.
    pub(super) fn park_if_full(
        &mut self,
        (mut job, step, result): (Job, Step, io::Result<()>),
    ) -> Option<(Job, Step, io::Result<()>)> {
        let is_full = |err: &io::Error| err.kind() == io::ErrorKind::StorageFull;
        if result.as_ref().is_err_and(is_full) && self.disk.lacks_space(&self.retry) {
            self.held_bytes -= held_bytes(job.request());
            job.undo(&step);
            self.parked.push(job);
            if let Some(buffer) = step.into_buffer() {
                self.buffers.put(buffer);
            }
            return None;
        }
        Some((job, step, result))
    }

    /// Returns the next step to retry, with a new copy of its data. Returns `None` if nothing is to
    /// be retried, or the worker holds too many bytes.
    pub(super) fn take_retry(&mut self, memory: &MappedMemory) -> Option<(Job, Step)> {
        while self.held_bytes < HELD_BYTES_MAX {
            let job = self.retries.pop_front()?;
            self.held_bytes += held_bytes(job.request());
            let next = self.continue_job(memory, job);
            if next.is_some() {
                return next;
            }
        }
        None
    }

    /// Records the result of a flush. Returns the job if the flush failed. If the flush succeeded,
    /// [`Self::take_flushed`] returns the job once all flushes that overlapped with it have ended.
    pub(super) fn flushed(
        &mut self,
        job: Job,
        ticket: Ticket,
        result: io::Result<()>,
    ) -> Option<(Job, io::Result<()>)> {
        self.disk.flushed(job.since(), &result);
        let answered = ticket.end();
        if result.is_err() {
            return Some((job, result));
        }
        self.awaiting_flushes.push((job, answered));
        None
    }

    /// Takes the jobs whose flush and all flushes that overlapped with it have ended. Returns them
    /// with their results.
    pub(super) fn take_flushed(&mut self) -> Vec<(Job, io::Result<()>)> {
        let (flushes, flush_ended) = (self.disk.flushes(), &self.flush_ended);
        let over = |&mut (_, answered): &mut _| flushes.has_ended(answered, flush_ended);
        self.awaiting_flushes
            .extract_if(.., over)
            .map(|(job, _)| (job, self.disk.flush_result()))
            .collect()
    }

    fn end_job(&mut self, memory: &MappedMemory, job: &Job, result: io::Result<u64>) {
        self.open -= 1;
        self.held_bytes -= held_bytes(job.request());
        let kind = Kind::from(&job.request().operation);
        self.end(memory, job.request(), kind, job.taken_at(), result);
    }

    /// Answers a request that was taken from the ring at `taken`, and updates the metrics. `result`
    /// is an error or the number of bytes written to the request's buffers.
    fn end(
        &mut self,
        memory: &MappedMemory,
        request: &Request,
        kind: Kind,
        taken: Instant,
        result: io::Result<u64>,
    ) {
        let metrics = self.disk.metrics();
        metrics.finished(kind, result.is_ok(), taken.elapsed());
        let (status, len) = match result {
            Ok(len) => {
                metrics.transferred(kind, transferred_bytes(request));
                (Status::Ok, len)
            }
            Err(err) => {
                let (disk, operation) = (&self.disk.shape().id, kind.as_str());
                rate_limited!(warn, disk, operation, %err, "Guest request failed");
                (Status::IoError, 0)
            }
        };
        self.answer(memory, request.head, request.status, status, len);
    }

    /// Writes the status and returns the chain to the driver. The used length is `len` plus the
    /// status byte.
    fn answer(
        &mut self,
        memory: &MappedMemory,
        head: u16,
        at: GuestAddress,
        status: Status,
        len: u64,
    ) {
        let len = match memory.write_obj(status.code(), at) {
            // The sum fits, because a chain including its status byte has less than 2^32 bytes.
            Ok(()) => u32::try_from(len + 1).unwrap_or(u32::MAX),
            Err(err) => {
                self.disk.metrics().bad_requests.fetch_add(1, Ordering::Relaxed);
                debug!(disk = self.disk.shape().id, %err, "Cannot write a status byte");
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

    /// Checks whether the driver wants an interrupt for new entries of the used ring.
    pub(super) fn check_interrupt(&mut self, memory: &MappedMemory) {
        if std::mem::take(&mut self.used) {
            self.is_interrupt_due |= self.queue.queue.needs_notification(memory).unwrap_or(true);
        }
    }

    pub(super) fn interrupt_if_due(&mut self) {
        if std::mem::take(&mut self.is_interrupt_due)
            && let Err(err) = self.interrupt.signal_queue(self.index)
        {
            rate_limited!(warn, disk = self.disk.shape().id, %err, "Cannot interrupt the driver");
        }
    }

    fn takes_more(&self) -> bool {
        !self.gate.is_closed()
            && self.open < self.depth
            && self.held_bytes < HELD_BYTES_MAX
            && !self.lost
    }

    /// Enables notifications. Returns true if the driver has already added chains, for which it
    /// sends no notification.
    pub(super) fn is_wanted(&mut self, memory: &MappedMemory) -> bool {
        // If the worker may not take requests now, it resumes after the next answer or
        // notification.
        self.takes_more() && self.queue.wait_for_more(memory)
    }
}

/// Number of bytes that the largest step of the request copies or zeroes.
fn held_bytes(request: &Request) -> u64 {
    let longest = |lengths: &mut dyn Iterator<Item = u64>| lengths.max().unwrap_or(0);
    match &request.operation {
        Operation::Read(range, _) | Operation::Write(range, _) => {
            range.len_bytes().min(PIECE_BYTES_MAX)
        }
        Operation::Discard(ranges) => {
            longest(&mut ranges.iter().map(DiskRange::len_bytes)).min(RANGE_PIECE_BYTES_MAX)
        }
        Operation::WriteZeroes(ranges) => {
            longest(&mut ranges.iter().map(|(range, _)| range.len_bytes()))
                .min(RANGE_PIECE_BYTES_MAX)
        }
        Operation::Flush | Operation::GetId(_) => 0,
    }
}

fn transferred_bytes(request: &Request) -> u64 {
    match &request.operation {
        Operation::Read(range, _) | Operation::Write(range, _) => range.len_bytes(),
        _ => 0,
    }
}

impl Drop for Worker {
    /// Records the results of flushes in progress. A failed flush affects all queues, even if the
    /// driver no longer waits for the result.
    fn drop(&mut self) {
        self.gate.set_busy(false);
        for (job, ticket, result) in self.ring.iter_mut().flat_map(Ring::drain_flushes) {
            self.disk.flushed(job.since(), &result);
            drop(ticket);
        }
        if let Some(ring) = self.ring.take() {
            self.idle_executor.keep(ring.into_executor());
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(KICK, ops);
        let events = [
            (Some(&*self.flush_ended), FLUSH_ENDED),
            (Some(&*self.retry), RETRY),
            (self.ring.as_ref().map(Ring::event), DONE),
        ];
        for (event, data) in events {
            if let Some(event) = event
                && let Err(err) = ops.add(Events::with_data(event, data, EventSet::IN))
            {
                rate_limited!(
                    error,
                    ?err,
                    disk = self.disk.shape().id,
                    "Cannot watch the files of a disk"
                );
            }
        }
        self.serve_or_wait();
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        // The read fails only if the event was already read.
        match events.data() {
            KICK => self.queue.clear_kick(),
            FLUSH_ENDED => {
                let _ = self.flush_ended.read();
            }
            RETRY => {
                let _ = self.retry.read();
                self.retries.extend(self.parked.drain(..));
            }
            _ => {
                let _ = self.ring.as_ref().map(|ring| ring.event().read());
            }
        }
        self.serve_or_wait();
    }
}
