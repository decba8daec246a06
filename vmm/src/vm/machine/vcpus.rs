//! vCPUs of a machine: those that the guest uses, and parked ones that can be added again.
//!
//! KVM cannot remove a vCPU. The thread of an ejected vCPU therefore still exists, but does not run
//! the guest. When the vCPU is added again, it starts as if it had never run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use foreshore_devices::events::Event;
use kvm_ioctls::VcpuFd;
use tracing::{info, warn};

use crate::acpi::ged;
use crate::acpi::hotplug_cpus::CpuRegisters;
use crate::acpi::plug::{Pending, Step};
use crate::cpu::CpuError;
use crate::cpu::metrics::VcpuMetrics;
use crate::cpu::run::{Pausing, Vcpu};
use crate::vm::machine::KvmMachine;
use crate::vm::request::VmError;

/// Kind of device in the hotplug metrics.
pub(super) const KIND: &str = "vcpu";

/// Maximum time to wait until parked vCPUs have completed their last exits, before they are added
/// again. An exit may wait for a disk, and the disk may wait for its host.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// Thread that runs a vCPU.
pub(in crate::vm) trait Processor {
    /// vCPU that KVM has created, without its initial state and without a thread.
    type Created;

    /// ID of the thread in /proc.
    fn thread_id(&self) -> i32;
    fn resume(&self);
    fn pause(&self) -> Pausing;
    fn send_nmi(&self);
    fn begin_afresh(&self);
    fn wait_until_fresh(&self, deadline: Instant) -> bool;
}

impl Processor for Vcpu {
    type Created = VcpuFd;

    fn thread_id(&self) -> i32 {
        Self::thread_id(self)
    }

    fn resume(&self) {
        Self::resume(self);
    }

    fn pause(&self) -> Pausing {
        Self::pause(self)
    }

    fn send_nmi(&self) {
        Self::send_nmi(self);
    }

    fn begin_afresh(&self) {
        Self::begin_afresh(self);
    }

    fn wait_until_fresh(&self, deadline: Instant) -> bool {
        Self::wait_until_fresh(self, deadline)
    }
}

pub(in crate::vm) trait Maker<P: Processor>: Send {
    /// Creates the vCPU in KVM. Called once for each index. As long as the VM exists, KVM refuses a
    /// second vCPU with the same index, even if the first one is closed. A vCPU is therefore lost
    /// if its `kvm_run` page cannot be mapped.
    fn create(&self, index: u8) -> Result<P::Created, CpuError>;

    /// Starts the thread of a vCPU that KVM has created, and sets the initial state of the vCPU. On
    /// failure, returns the created vCPU for another attempt.
    fn finish(&self, index: u8, created: P::Created) -> Result<P, (P::Created, CpuError)>;
}

struct Made<P> {
    processor: P,
    /// True if the guest has not been given the vCPU yet, or has ejected it.
    is_parked: bool,
    /// True if the guest has the vCPU, or had it before.
    is_used: bool,
}

pub(in crate::vm) struct Vcpus<P: Processor = Vcpu> {
    made: BTreeMap<u8, Made<P>>,
    /// vCPUs that were created in KVM, but could not be completed.
    unfinished: BTreeMap<u8, P::Created>,
    maker: Box<dyn Maker<P>>,
    registers: Arc<CpuRegisters>,
    metrics: Arc<VcpuMetrics>,
    /// True if the guest's vCPUs may run.
    run: bool,
}

impl<P: Processor> Vcpus<P> {
    /// Creates the vCPUs that are present at boot. They are paused.
    pub(in crate::vm) fn new(
        maker: Box<dyn Maker<P>>,
        registers: Arc<CpuRegisters>,
    ) -> Result<Self, CpuError> {
        let metrics = Arc::new(VcpuMetrics::default());
        let (made, unfinished) = (BTreeMap::new(), BTreeMap::new());
        let mut vcpus = Self { made, unfinished, maker, registers, metrics, run: false };
        for index in 0..vcpus.registers.plug(|plug| plug.present()) {
            vcpus.make(index)?;
            vcpus.unpark(index);
        }
        vcpus.count();
        Ok(vcpus)
    }

    pub(in crate::vm) fn metrics(&self) -> Arc<VcpuMetrics> {
        Arc::clone(&self.metrics)
    }

    /// Creates a parked vCPU, unless it already exists.
    fn make(&mut self, index: u8) -> Result<(), CpuError> {
        if self.made.contains_key(&index) {
            return Ok(());
        }
        let created = match self.unfinished.remove(&index) {
            Some(created) => created,
            None => self.maker.create(index)?,
        };
        match self.maker.finish(index, created) {
            Ok(processor) => {
                self.metrics.threads.lock().insert(index, processor.thread_id());
                drop(self.made.insert(index, Made { processor, is_parked: true, is_used: false }))
            }
            Err((created, err)) => {
                self.unfinished.insert(index, created);
                return Err(err);
            }
        }
        Ok(())
    }

    fn unpark(&mut self, index: u8) {
        let made = self.made.get_mut(&index).expect("one that has been made");
        (made.is_parked, made.is_used) = (false, true);
        if self.run {
            made.processor.resume();
        }
    }

    fn count(&self) {
        let (present, pending) = self.registers.plug(|plug| (plug.present(), plug.pending().len()));
        self.metrics.present.store(present.into(), Ordering::Relaxed);
        self.metrics.leaving.store(pending as u64, Ordering::Relaxed);
        let parked = self.made.values().filter(|made| made.is_parked).count();
        self.metrics.parked.store(parked as u64, Ordering::Relaxed);
    }

    fn running(&self) -> impl Iterator<Item = &P> {
        self.made.values().filter(|made| !made.is_parked).map(|made| &made.processor)
    }

    /// Number of vCPUs that are not parked.
    pub(in crate::vm) fn running_count(&self) -> u8 {
        self.running().map(|_| 1).sum()
    }

    pub(in crate::vm) fn resume(&mut self) {
        self.run = true;
        self.running().for_each(P::resume);
    }

    /// Requests that all vCPUs stop, including parked vCPUs, which may still be in an exit.
    pub(in crate::vm) fn pause(&mut self) -> Vec<Pausing> {
        self.run = false;
        self.made.values().map(|made| made.processor.pause()).collect()
    }

    pub(in crate::vm) fn send_nmi(&self) {
        self.running().for_each(P::send_nmi);
    }

    pub(in crate::vm) fn end(&mut self) {
        self.made.clear();
    }

    /// Adds the vCPUs in `come` to the guest: all of them or none.
    ///
    /// 1. The vCPUs are created if necessary. vCPUs that were in the guest before are reset. A
    ///    reset drops a latched INIT and SIPI.
    /// 2. The vCPUs may run. They then wait until the guest starts them.
    /// 3. The guest is notified, and sends INIT and SIPI. The notification must follow step 1,
    ///    because a reset would drop both.
    fn give(&mut self, come: std::ops::Range<u8>) -> Result<(), CpuError> {
        come.clone().try_for_each(|index| self.make(index))?;
        let used = || self.made.range(come.clone()).filter(|(_, made)| made.is_used);
        used().for_each(|(_, made)| made.processor.begin_afresh());
        let deadline = Instant::now() + EXIT_LIMIT;
        if let Some((&index, _)) =
            used().find(|(_, made)| !made.processor.wait_until_fresh(deadline))
        {
            return Err(CpuError::Busy { index });
        }
        come.clone().for_each(|index| self.unpark(index));
        self.registers.plug(|plug| plug.put(come));
        self.count();
        Ok(())
    }

    /// Parks a vCPU that the guest has ejected. Returns the number of present vCPUs if no further
    /// ejection is pending.
    fn park(&mut self, index: u8) -> Option<u8> {
        let made = self.made.get_mut(&index).expect("a vCPU that the guest had");
        made.is_parked = true;
        // The stop is not waited for, because the vCPU may be in a long exit.
        drop(made.processor.pause());
        let left = self.registers.plug(|plug| {
            plug.parked(index);
            plug.pending().is_empty().then(|| plug.present())
        });
        self.count();
        left
    }
}

impl KvmMachine {
    pub(in crate::vm) fn vcpus_step(&self, desired: u8) -> Result<Step, VmError> {
        self.vcpus.registers.plug(|plug| plug.step(desired)).map_err(|Pending(leaving)| {
            self.hotplug.metrics.count(KIND, "resize", "pending");
            VmError::VcpusLeaving {
                leaving: leaving.iter().map(u8::to_string).collect::<Vec<_>>().join(", "),
            }
        })
    }

    /// Executes the step towards `desired` vCPUs. New vCPUs are added immediately. If there are too
    /// many vCPUs, the guest is requested to eject some.
    pub(in crate::vm) fn change_vcpus(&mut self, desired: u8, step: Step) -> Result<(), VmError> {
        let registers = Arc::clone(&self.vcpus.registers);
        match step {
            Step::Nothing => {
                if registers.plug(|plug| plug.notify_again()) {
                    self.notify_vcpus();
                }
            }
            Step::Come(come) => {
                let count = come.len();
                let result = self.vcpus.give(come);
                let counted = if result.is_ok() { "ok" } else { "error" };
                (0..count).for_each(|_| self.hotplug.metrics.count(KIND, "add", counted));
                result.map_err(|err| VmError::Failed(foreshore_types::chain(&err)))?;
                self.notify_vcpus();
                info!(vcpus = desired, "vCPUs are added");
                self.context.machine.events.emit(Event::VcpusResized { vcpus: desired });
            }
            Step::Go(go) => {
                go.clone().for_each(|_| self.hotplug.metrics.count(KIND, "remove", "requested"));
                registers.plug(|plug| plug.request_removal(go));
                self.vcpus.count();
                self.notify_vcpus();
            }
        }
        Ok(())
    }

    /// Parks a vCPU that the guest has ejected.
    pub(in crate::vm) fn park_vcpu(&mut self, index: u8) {
        self.hotplug.metrics.count(KIND, "remove", "ok");
        if let Some(vcpus) = self.vcpus.park(index) {
            info!(vcpus, "vCPUs are removed");
            self.context.machine.events.emit(Event::VcpusResized { vcpus });
        }
    }

    fn notify_vcpus(&self) {
        if let Err(err) = self.hotplug.ged.notify(ged::Event::Cpus) {
            warn!(%err, "Cannot notify the guest of a change of vCPUs; the next resize retries this");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::mem;

    use foreshore_devices::bus::BusDevice;
    use parking_lot::Mutex;

    use super::*;
    use crate::acpi::hotplug_cpus::{CPU_SELECT, CPU_STATUS};
    use crate::acpi::plug::Plug;

    struct NoVcpus;

    impl Maker<Vcpu> for NoVcpus {
        fn create(&self, _: u8) -> Result<VcpuFd, CpuError> {
            unreachable!("a machine without vCPUs")
        }

        fn finish(&self, _: u8, _: VcpuFd) -> Result<Vcpu, (VcpuFd, CpuError)> {
            unreachable!("a machine without vCPUs")
        }
    }

    impl Vcpus {
        pub(in crate::vm) fn none() -> Self {
            Self::new(Box::new(NoVcpus), Arc::new(CpuRegisters::new(Plug::new(0, 0), |_| ())))
                .unwrap()
        }
    }

    /// Calls to fake vCPUs: index and name of the call.
    type Calls = Arc<Mutex<Vec<(u8, &'static str)>>>;
    /// Index of the faulty vCPU, if there is one.
    type Index = Arc<Mutex<Option<u8>>>;

    struct Fake {
        index: u8,
        calls: Calls,
        busy: Index,
    }

    impl Fake {
        fn record(&self, verb: &'static str) {
            self.calls.lock().push((self.index, verb));
        }
    }

    impl Processor for Fake {
        type Created = u8;

        fn thread_id(&self) -> i32 {
            1000 + i32::from(self.index)
        }

        fn resume(&self) {
            self.record("resume");
        }

        fn pause(&self) -> Pausing {
            self.record("pause");
            Pausing::over()
        }

        fn send_nmi(&self) {
            self.record("nmi");
        }

        fn begin_afresh(&self) {
            self.record("afresh");
        }

        fn wait_until_fresh(&self, _: Instant) -> bool {
            self.record("wait");
            *self.busy.lock() != Some(self.index)
        }
    }

    struct FakeMaker {
        calls: Calls,
        created: Mutex<BTreeSet<u8>>,
        broken: Index,
        busy: Index,
    }

    impl FakeMaker {
        fn refuse(what: &'static str, index: u8, errno: i32) -> CpuError {
            CpuError::Kvm { what, index, source: kvm_ioctls::Error::new(errno) }
        }
    }

    impl Maker<Fake> for FakeMaker {
        fn create(&self, index: u8) -> Result<u8, CpuError> {
            match self.created.lock().insert(index) {
                true => Ok(index),
                false => Err(Self::refuse("create", index, libc::EEXIST)),
            }
        }

        fn finish(&self, index: u8, created: u8) -> Result<Fake, (u8, CpuError)> {
            assert_eq!(index, created);
            if *self.broken.lock() == Some(index) {
                return Err((created, Self::refuse("set the CPUID of", index, libc::ENOMEM)));
            }
            let fake = Fake { index, calls: Arc::clone(&self.calls), busy: Arc::clone(&self.busy) };
            fake.record("make");
            Ok(fake)
        }
    }

    struct Rig {
        vcpus: Vcpus<Fake>,
        calls: Calls,
        /// vCPU that cannot be completed.
        broken: Index,
        /// vCPU that does not complete its exit.
        busy: Index,
    }

    impl Rig {
        fn new(boot: u8, max: u8) -> Self {
            let (calls, broken, busy) = (Calls::default(), Index::default(), Index::default());
            let maker = FakeMaker {
                calls: Arc::clone(&calls),
                created: Mutex::default(),
                broken: Arc::clone(&broken),
                busy: Arc::clone(&busy),
            };
            let registers = Arc::new(CpuRegisters::new(Plug::new(boot, max), |_| ()));
            Self { vcpus: Vcpus::new(Box::new(maker), registers).unwrap(), calls, broken, busy }
        }

        /// Returns the calls since this function was last called.
        fn calls(&self) -> Vec<(u8, &'static str)> {
            mem::take(&mut *self.calls.lock())
        }

        /// Requests the ejection of a vCPU, ejects it as a guest would, and parks it.
        fn take(&mut self, index: u8) -> Option<u8> {
            let registers = &self.vcpus.registers;
            registers.plug(|plug| plug.request_removal(index..index + 1));
            registers.write(CPU_SELECT, &u32::from(index).to_le_bytes());
            registers.write(CPU_STATUS, &[1, 0, 0, 0]);
            self.vcpus.park(index)
        }

        fn counts(&self) -> [u64; 3] {
            let metrics = &self.vcpus.metrics;
            [&metrics.present, &metrics.leaving, &metrics.parked]
                .map(|gauge| gauge.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn vcpu_added_again_is_reused_and_reset() {
        let mut rig = Rig::new(1, 3);
        rig.vcpus.resume();
        assert_eq!(rig.calls(), [(0, "make"), (0, "resume")]);
        rig.vcpus.give(1..3).unwrap();
        assert_eq!(rig.calls(), [(1, "make"), (2, "make"), (1, "resume"), (2, "resume")]);
        assert_eq!(rig.counts(), [3, 0, 0]);
        assert_eq!(rig.take(2), Some(2));
        assert_eq!(rig.calls(), [(2, "pause")]);
        assert_eq!(rig.counts(), [2, 0, 1]);
        rig.vcpus.give(2..3).unwrap();
        assert_eq!(rig.calls(), [(2, "afresh"), (2, "wait"), (2, "resume")]);
        assert_eq!(rig.counts(), [3, 0, 0]);
        let threads = rig.vcpus.metrics.threads.lock().clone();
        assert_eq!(threads, BTreeMap::from([(0, 1000), (1, 1001), (2, 1002)]));
    }

    #[test]
    fn vcpu_added_again_is_reset_before_guest_is_notified() {
        let mut rig = Rig::new(4, 4);
        rig.vcpus.resume();
        rig.take(3);
        rig.take(2);
        *rig.busy.lock() = Some(3);
        rig.calls();
        for _ in 0..2 {
            assert!(matches!(rig.vcpus.give(2..4), Err(CpuError::Busy { index: 3 })));
            // The other vCPU is not added either.
            assert_eq!(
                rig.vcpus.registers.plug(|plug| (plug.present(), plug.next_added())),
                (2, None)
            );
            assert_eq!(rig.calls(), [(2, "afresh"), (3, "afresh"), (2, "wait"), (3, "wait")]);
            assert_eq!(rig.counts(), [2, 0, 2]);
        }
        // A vCPU may also be added while the VM is paused.
        rig.vcpus.pause();
        *rig.busy.lock() = None;
        rig.calls();
        rig.vcpus.give(2..4).unwrap();
        assert_eq!(rig.calls(), [(2, "afresh"), (3, "afresh"), (2, "wait"), (3, "wait")]);
        assert_eq!(rig.vcpus.registers.plug(|plug| plug.present()), 4);
    }

    #[test]
    fn parked_vcpu_does_not_run_and_receives_no_nmi() {
        let mut rig = Rig::new(2, 2);
        rig.vcpus.resume();
        rig.take(1);
        rig.calls();
        rig.vcpus.send_nmi();
        assert_eq!(rig.vcpus.pause().len(), 2, "it may be in its last exit");
        rig.vcpus.resume();
        assert_eq!(rig.calls(), [(0, "nmi"), (0, "pause"), (1, "pause"), (0, "resume")]);
    }

    #[test]
    fn vcpu_added_during_a_pause_runs_after_resume() {
        let mut rig = Rig::new(1, 2);
        rig.vcpus.give(1..2).unwrap();
        assert_eq!(rig.calls(), [(0, "make"), (1, "make")]);
        rig.vcpus.resume();
        assert_eq!(rig.calls(), [(0, "resume"), (1, "resume")]);
    }

    #[test]
    fn vcpus_are_added_all_or_none() {
        let mut rig = Rig::new(1, 4);
        rig.vcpus.resume();
        *rig.broken.lock() = Some(3);
        // Repeated attempts fail in the same way.
        for _ in 0..3 {
            let error = rig.vcpus.give(1..4).unwrap_err();
            assert!(
                matches!(error, CpuError::Kvm { source, .. } if source.errno() == libc::ENOMEM)
            );
            assert_eq!(
                rig.vcpus.registers.plug(|plug| (plug.present(), plug.next_added())),
                (1, None)
            );
        }
        rig.calls();
        *rig.broken.lock() = None;
        rig.vcpus.give(1..4).unwrap();
        assert_eq!(rig.calls(), [(3, "make"), (1, "resume"), (2, "resume"), (3, "resume")]);
    }

    #[test]
    fn last_ejection_returns_number_of_vcpus() {
        let mut rig = Rig::new(3, 3);
        rig.vcpus.registers.plug(|plug| plug.request_removal(1..3));
        for (index, left) in [(2u32, None), (1, Some(1))] {
            rig.vcpus.registers.write(CPU_SELECT, &index.to_le_bytes());
            rig.vcpus.registers.write(CPU_STATUS, &[1, 0, 0, 0]);
            assert_eq!(rig.vcpus.park(index as u8), left);
        }
    }
}
