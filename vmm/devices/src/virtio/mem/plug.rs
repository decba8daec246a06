//! Execution of plug and unplug requests.

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
use crate::log::rate_limited;
use crate::memory::backing::{Backing, BackingError};
use crate::memory::slots::{HotplugSlots, SlotError};
use crate::memory::view::GuestView;

/// Failure of the host during a plug or unplug.
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

/// Executor of requests, which exists as long as the device and is not affected by resets.
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

    /// Executes `request`. A plug or unplug of a run of blocks is executed completely or not at
    /// all. If the request exceeds the budget, returns the time after which it can be retried. The
    /// retry checks the request again, because the requested size may have changed. The caller must
    /// not hold a guard of the view, because an unplug waits for all guards.
    pub(super) fn execute(&mut self, request: Request, now: Instant) -> Result<Response, Duration> {
        self.ahead.pause();
        // A refused request uses no byte tokens. A request that fails on the host does use them,
        // because it may already have caused memory to be erased.
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
                rate_limited!(
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

    /// Prepares for the next expected request of the driver. Executes one short step and returns
    /// true if another step remains.
    pub(super) fn prepare(&mut self, now: Instant) -> bool {
        if let Some(step) = self.ahead.next()
            && let Err(err) = self.backing.populate(step.start, step.end - step.start)
        {
            // The error is ignored, because the guest's own page faults allocate the memory later.
            debug!(zone = %self.shared.zone.id, %err, "Cannot populate pages for the next unplug");
            self.ahead.pause();
        }
        let missing = {
            let state = self.shared.state.lock();
            state.requested_bytes().saturating_sub(state.plugged_bytes())
        };
        // The error is ignored here. If the slot is still unavailable later, the request that needs
        // it fails.
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

    /// Time at which [`Executor::sweep`] should be called.
    pub(super) fn sweep_due(&self) -> Option<Instant> {
        self.slots.sweep_due()
    }

    /// Removes slots that have been empty for a certain time.
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
                        | BackingError::Storage { available_bytes, .. }
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

    /// Answers BUSY. After ERROR, the driver would permanently stop using the device, although only
    /// the host has failed.
    fn fail(&self, err: &HostError) -> Response {
        let reason = err.reason();
        let (plugged_bytes, requested_bytes) = {
            let state = self.shared.state.lock();
            (state.plugged_bytes(), state.requested_bytes())
        };
        rate_limited!(
            warn,
            zone = %self.shared.zone.id,
            err = err as &dyn std::error::Error,
            "Host cannot carry out a request of the driver"
        );
        self.shared.metrics.failed(reason);
        self.shared.report(MemEvent::HostFailure { reason, plugged_bytes, requested_bytes });
        Response::Busy
    }

    /// Lowers the requested size to the plugged size plus `left`. Otherwise the driver would retry
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

    /// Plugs blocks. The caller must have checked the request.
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), HostError> {
        // 1. Map the memory, which is not accessible yet.
        self.backing.plug(offset, len)?;
        // 2. Add the KVM slots. From here on, a vCPU that accesses the blocks too early reaches
        //    zeroed memory of its own VM.
        if let Err(err) = self.slots.acquire(offset, len) {
            self.undo_plug(offset, len);
            return Err(err.into());
        }
        // 3. Update the view. As soon as the driver has its answer, it may pass buffers in these
        //    blocks to devices.
        let addr = self.shared.state.lock().address(offset);
        self.view.exclusive().set_plugged(addr, len, true);
        // 4. Record the new state. The caller then acknowledges the request.
        self.shared.state.lock().commit(offset, len, true);
        Ok(())
    }

    /// Returns the memory of a failed plug. If the memory cannot be detached, the backing keeps it,
    /// mapped or not, and the pool does not lend it again.
    fn undo_plug(&mut self, offset: u64, len: u64) {
        let result = self.backing.detach(offset, len).and_then(|()| self.backing.free_detached());
        if let Err(err) = result {
            self.shared.metrics.scrub_failures.fetch_add(1, Ordering::Relaxed);
            rate_limited!(
                error,
                zone = %self.shared.zone.id, %err,
                "Cannot return the memory of a failed plug; it stays set aside"
            );
        }
    }

    /// Unplugs blocks. The caller must have checked the request.
    fn unplug(&mut self, offset: u64, len: u64) -> Result<(), HostError> {
        let addr = self.shared.state.lock().address(offset);
        // 1. Update the view. This waits for accesses in progress and prevents new ones.
        self.view.exclusive().set_plugged(addr, len, false);
        // 2. Unmap the memory, which also removes the pages from KVM's page tables.
        if let Err(err) = self.backing.detach(offset, len) {
            self.view.exclusive().set_plugged(addr, len, true);
            return Err(err.into());
        }
        // 3. Release the slots. Empty slots are removed after a quiet time. Until then, PROT_NONE
        //    prevents accesses to them.
        self.slots.release(offset, len, Instant::now());
        // 4. Return the memory to the pool. Devices are not blocked during this step. The memory is
        //    scrubbed before its next use. Memory that cannot be returned remains set aside.
        if let Err(err) = self.backing.free_detached() {
            self.shared.metrics.scrub_failures.fetch_add(1, Ordering::Relaxed);
            rate_limited!(
                error,
                zone = %self.shared.zone.id, %err,
                "Cannot return unplugged memory; it stays set aside"
            );
        }
        // 5. Record the new state. The caller then acknowledges the request.
        self.shared.state.lock().commit(offset, len, false);
        Ok(())
    }

    /// Assumes that Linux unplugs the run below `run` next if more memory is plugged than
    /// requested.
    fn expect_the_run_below(&mut self, run: &Range<u64>) {
        let below = run.start.saturating_sub(run.end - run.start);
        // The lock is held only in this block. The check for pages below needs system calls, and a
        // vCPU that reads the configuration would wait for the lock.
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

    /// Unplugs all blocks. If it fails, blocks that are already unplugged remain unplugged, and the
    /// driver sends the request again for the rest.
    fn unplug_all(&mut self) -> Result<(), HostError> {
        let runs = self.shared.state.lock().plugged_runs();
        for (offset, len) in runs {
            self.unplug(offset, len)?;
        }
        self.shared.state.lock().shrink_usable();
        Ok(())
    }
}
