//! Execution of requests.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::debug;

use super::ahead::ZeroAhead;
use super::budget::PlugBudget;
use super::handle::{MemEvent, Shared};
use super::metrics::FailureReason;
use super::request::{BlockRun, Request, Response};
use super::state::Refusal;
use crate::log::sparsely;
use crate::memory::backing::{Backing, BackingError};
use crate::memory::slots::{HotplugSlots, SlotError};
use crate::memory::view::GuestView;

/// Failure of the host.
#[derive(Debug, thiserror::Error)]
pub(super) enum HostError {
    #[error(transparent)]
    Backing(#[from] BackingError),
    #[error(transparent)]
    Slot(#[from] SlotError),
}

impl HostError {
    fn reason(&self) -> FailureReason {
        match self {
            Self::Backing(err) => err.into(),
            Self::Slot(_) => FailureReason::Slot,
        }
    }
}

/// Executes requests. It lives as long as the device, across resets.
pub(super) struct Executor {
    backing: Box<dyn Backing>,
    slots: HotplugSlots,
    view: GuestView,
    ahead: ZeroAhead,
    budget: Arc<Mutex<PlugBudget>>,
    shared: Arc<Shared>,
}

impl Executor {
    pub(super) fn new(
        backing: Box<dyn Backing>,
        slots: HotplugSlots,
        view: GuestView,
        budget: Arc<Mutex<PlugBudget>>,
        shared: Arc<Shared>,
    ) -> Self {
        let ahead = ZeroAhead::new(shared.state.lock().block_bytes());
        Self { backing, slots, view, ahead, budget, shared }
    }

    /// Executes `request` completely or not at all. If the request exceeds the budget, returns the
    /// time after which it may be tried again. It is checked again then, because the requested size
    /// may have changed. The caller must not hold a guard of the view, because an unplug waits for
    /// all guards.
    pub(super) fn execute(&mut self, request: Request, now: Instant) -> Result<Response, Duration> {
        self.ahead.pause();
        // A refused request plugs nothing. One that fails on the host may have erased memory
        // before.
        let plugged_bytes = match request {
            Request::Plug(run) => {
                self.shared.state.lock().check_plug(run).map_or(0, |(_, len)| len)
            }
            _ => 0,
        };
        self.budget.lock().take(plugged_bytes, now)?;
        Ok(match request {
            Request::Plug(run) => self.execute_plug(run, now),
            Request::Unplug(run) => self.execute_unplug(run, now),
            Request::UnplugAll => {
                let before = self.shared.state.lock().plugged_bytes();
                let result = self.unplug_all();
                self.answer_unplug(result, before, now)
            }
            Request::State(run) => {
                let state = self.shared.state.lock().block_state(run);
                match state {
                    Ok(state) => Response::AckState(state),
                    Err(refusal) => self.refuse(refusal),
                }
            }
            Request::Unknown(code) => {
                sparsely!(
                    warn,
                    zone = %self.shared.zone.id, code,
                    "Driver sent a request of an unknown type"
                );
                self.refuse(Refusal::Error)
            }
        })
    }

    fn execute_plug(&mut self, run: BlockRun, now: Instant) -> Response {
        let checked = self.shared.state.lock().check_plug(run);
        match checked {
            Ok((offset, len)) => self.answer_plug(offset, len, now),
            Err(refusal) => self.refuse(refusal),
        }
    }

    fn execute_unplug(&mut self, run: BlockRun, now: Instant) -> Response {
        let checked = self.shared.state.lock().check_unplug(run);
        let (offset, len) = match checked {
            Ok(run) => run,
            Err(refusal) => return self.refuse(refusal),
        };
        let run = offset..offset + len;
        let zeroed = self
            .ahead
            .was_zeroed(&run, |run, block_bytes| self.backing.populated_blocks(run, block_bytes));
        let result = self.unplug(offset, len);
        if result.is_ok() && zeroed {
            self.expect_the_run_below(&run);
        } else {
            self.ahead.forget();
        }
        self.answer_unplug(result, len, now)
    }

    /// Prepares for the request that the driver is expected to send next, in short steps. Returns
    /// true if another step remains.
    pub(super) fn prepare(&mut self, now: Instant) -> bool {
        if let Some(step) = self.ahead.next()
            && let Err(err) = self.backing.populate(step.start, step.end - step.start)
        {
            // The guest's own faults will show if memory is available.
            debug!(zone = %self.shared.zone.id, %err, "Cannot populate pages for the next unplug");
            self.ahead.pause();
        }
        let missing = {
            let state = self.shared.state.lock();
            state.requested_bytes().saturating_sub(state.plugged_bytes())
        };
        // If no slot is available, the request that needs it fails.
        if missing > 0
            && let Err(err) = self.slots.prepare(missing, now)
        {
            debug!(zone = %self.shared.zone.id, %err, "Cannot prepare a slot for the next request");
        }
        self.ahead.is_busy()
    }

    #[cfg(test)]
    pub(super) fn is_preparing(&self) -> bool {
        self.ahead.is_busy()
    }

    /// Time at which [`Executor::sweep`] removes slots.
    pub(super) fn sweep_due(&self) -> Option<Instant> {
        self.slots.sweep_due()
    }

    /// Removes slots that have been empty for long enough.
    pub(super) fn sweep(&mut self, now: Instant) {
        self.slots.sweep(now);
    }

    fn refuse(&self, refusal: Refusal) -> Response {
        let (counter, response) = match refusal {
            Refusal::Error => (&self.shared.metrics.errors, Response::Error),
            Refusal::Nack => (&self.shared.metrics.nacks, Response::Nack),
        };
        counter.fetch_add(1, Ordering::Relaxed);
        response
    }

    fn answer_plug(&mut self, offset: u64, len: u64, started: Instant) -> Response {
        match self.plug(offset, len) {
            Ok(()) => {
                self.shared.metrics.plug.done(len, started.elapsed());
                self.shared.report_sizes();
                Response::Ack
            }
            Err(err) => {
                let left = match &err {
                    HostError::Backing(
                        BackingError::PoolFull { available_bytes, .. }
                        | BackingError::HugePages { available_bytes, .. },
                    ) => *available_bytes,
                    _ => 0,
                };
                self.lower_requested(left.min(len - 1), err.reason());
                self.fail(&err)
            }
        }
    }

    fn answer_unplug(
        &mut self,
        result: Result<(), HostError>,
        len: u64,
        started: Instant,
    ) -> Response {
        match result {
            Ok(()) => {
                self.shared.metrics.unplug.done(len, started.elapsed());
                self.shared.report_sizes();
                Response::Ack
            }
            Err(err) => self.fail(&err),
        }
    }

    /// Answers BUSY, not ERROR, because the host has failed and ERROR would end the device
    /// permanently.
    fn fail(&self, err: &HostError) -> Response {
        let reason = err.reason();
        let (plugged_bytes, requested_bytes) = {
            let state = self.shared.state.lock();
            (state.plugged_bytes(), state.requested_bytes())
        };
        sparsely!(
            warn,
            zone = %self.shared.zone.id,
            err = err as &dyn std::error::Error,
            "Host cannot carry out a request of the driver"
        );
        self.shared.metrics.failed(reason);
        self.shared.report(MemEvent::HostFailure { reason, plugged_bytes, requested_bytes });
        Response::Busy
    }

    /// Lowers the requested size to the plugged size plus `left`, so that the driver does not retry
    /// a request that cannot succeed.
    fn lower_requested(&self, left: u64, reason: FailureReason) {
        let lowered = {
            let mut state = self.shared.state.lock();
            let reachable = state.plugged_bytes() + left;
            state.lower_requested(reachable, reason)
        };
        if lowered {
            self.shared.signal_config();
        }
    }

    /// Plugs blocks that were checked before.
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), HostError> {
        // 1. The memory, which is not accessible yet.
        self.backing.plug(offset, len)?;
        // 2. KVM's slots. From here on, an invalid access of a vCPU reaches zeroed memory of its
        //    own VM.
        if let Err(err) = self.slots.acquire(offset, len) {
            self.undo_plug(offset, len);
            return Err(err.into());
        }
        // 3. The view. The driver may pass buffers there to devices as soon as it has its answer.
        let addr = self.shared.state.lock().address(offset);
        self.view.exclusive().set_plugged(addr, len, true);
        // 4. The state. The caller acknowledges the request.
        self.shared.state.lock().commit(offset, len, true);
        Ok(())
    }

    /// Returns the memory of a failed plug. Memory that cannot be detached stays with the backing,
    /// mapped or not, and is not lent again.
    fn undo_plug(&mut self, offset: u64, len: u64) {
        let result = self.backing.detach(offset, len).and_then(|()| self.backing.free_detached());
        if let Err(err) = result {
            self.shared.metrics.scrub_failures.fetch_add(1, Ordering::Relaxed);
            sparsely!(
                error,
                zone = %self.shared.zone.id, %err,
                "Cannot return the memory of a failed plug; it stays set aside"
            );
        }
    }

    /// Unplugs blocks that were checked before.
    fn unplug(&mut self, offset: u64, len: u64) -> Result<(), HostError> {
        let addr = self.shared.state.lock().address(offset);
        // 1. The view. Waits for the last access in progress and prevents new ones.
        self.view.exclusive().set_plugged(addr, len, false);
        // 2. The mapping. This also removes the pages from KVM's page tables.
        if let Err(err) = self.backing.detach(offset, len) {
            self.view.exclusive().set_plugged(addr, len, true);
            return Err(err.into());
        }
        // 3. The slots. Empty ones are removed after a quiet time. Until then PROT_NONE protects
        //    them.
        self.slots.release(offset, len, Instant::now());
        // 4. The memory, while devices continue. It is scrubbed before its next use. Memory that
        //    cannot be returned stays set aside.
        if let Err(err) = self.backing.free_detached() {
            self.shared.metrics.scrub_failures.fetch_add(1, Ordering::Relaxed);
            sparsely!(
                error,
                zone = %self.shared.zone.id, %err,
                "Cannot return unplugged memory; it stays set aside"
            );
        }
        // 5. The state. The caller acknowledges the request.
        self.shared.state.lock().commit(offset, len, false);
        Ok(())
    }

    /// Expects Linux to continue with the run below, as long as more is plugged than requested.
    fn expect_the_run_below(&mut self, run: &Range<u64>) {
        let below = run.start.saturating_sub(run.end - run.start);
        // The lock must be released here: a vCPU that reads the configuration waits for it, and the
        // check for pages needs system calls.
        let (is_plugged, surplus_bytes) = {
            let state = self.shared.state.lock();
            let surplus_bytes = state.plugged_bytes().saturating_sub(state.requested_bytes());
            (state.is_all_plugged(below, run.start - below), surplus_bytes)
        };
        if is_plugged {
            self.ahead.expect_below(run, surplus_bytes, |run, block_bytes| {
                self.backing.populated_blocks(run, block_bytes)
            });
        } else {
            self.ahead.forget();
        }
    }

    /// Unplugs all blocks. After a failure, unplugged blocks stay unplugged, and the driver
    /// requests the rest again.
    fn unplug_all(&mut self) -> Result<(), HostError> {
        let runs = self.shared.state.lock().plugged_runs();
        for (offset, len) in runs {
            self.unplug(offset, len)?;
        }
        self.shared.state.lock().shrink_usable();
        Ok(())
    }
}
