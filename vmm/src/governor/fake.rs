//! Devices that do as they are told, or do not, and a governor that has two of them. For tests.

use std::cell::RefCell;
use std::io::{self, Cursor, Write};
use std::sync::Arc;
use std::time::Duration;

use balloon::governor::{AgentState, Counters};
use balloon::proto::Refusal;
use balloon::trace::{Reader, Trace};
use balloon::{DriverState, Shortfall, Tier, TimeMs, ZoneSizes};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use super::agent::{self, Heard, LineBudget};
use super::core::Core;
use super::task::Clock;
use super::{GovernedZone, GovernorError, ZoneDevice};
use crate::config::PressureConfig;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BLOCK: u64 = 2 * MIB;

/// A device whose guest follows at once, as long as it has a driver, or not at all.
pub(crate) struct FakeDevice {
    pub sizes: Mutex<ZoneSizes>,
    /// How often the governor has read them.
    pub reads: Mutex<u32>,
    follows: bool,
    /// What its host has for it.
    pub can_provide: Mutex<u64>,
    pub reminders: Mutex<u32>,
    /// How often a goal was reported to be out of reach.
    pub reported_held: Mutex<u32>,
}

impl FakeDevice {
    pub(crate) fn new(region_bytes: u64, follows: bool) -> Arc<Self> {
        let sizes = ZoneSizes::empty(0, Tier::Dram, region_bytes);
        Arc::new(Self {
            sizes: Mutex::new(sizes),
            reads: Mutex::default(),
            follows,
            can_provide: Mutex::new(u64::MAX),
            reminders: Mutex::new(0),
            reported_held: Mutex::new(0),
        })
    }
}

impl FakeDevice {
    /// Refuses the guest's driver, as a virtio-mem device does.
    pub(crate) fn refuse_driver(&self) {
        let mut sizes = self.sizes.lock();
        sizes.driver = DriverState::Unsupported;
        sizes.is_withdrawn = sizes.requested_bytes + sizes.held_bytes != sizes.plugged_bytes;
        (sizes.requested_bytes, sizes.held_bytes) = (sizes.plugged_bytes, 0);
    }
}

impl ZoneDevice for FakeDevice {
    fn sizes(&self) -> ZoneSizes {
        *self.reads.lock() += 1;
        *self.sizes.lock()
    }
    fn request(&self, size_bytes: u64) {
        let mut sizes = self.sizes.lock();
        assert!(
            sizes.driver != DriverState::Unsupported || size_bytes == sizes.plugged_bytes,
            "{size_bytes} bytes requested of an unsupported driver"
        );
        sizes.is_withdrawn = false;
        assert!(size_bytes <= sizes.max_bytes && size_bytes.is_multiple_of(BLOCK));
        let can_provide = *self.can_provide.lock();
        sizes.requested_bytes = size_bytes.min(can_provide);
        sizes.held_bytes = 0;
        let shortfall = Shortfall { reason: "pool-full", wanted_bytes: size_bytes };
        sizes.shortfall = (size_bytes > can_provide).then_some(shortfall);
        if self.follows && sizes.driver == DriverState::Ready {
            sizes.plugged_bytes = sizes.requested_bytes;
        }
    }
    fn request_step(&self, size_bytes: u64, goal_bytes: u64) {
        self.request(size_bytes);
        let mut sizes = self.sizes.lock();
        sizes.held_bytes =
            if sizes.shortfall.is_some() { 0 } else { goal_bytes.saturating_sub(size_bytes) };
    }
    fn remind(&self) {
        *self.reminders.lock() += 1;
    }
    fn report_held(&self) {
        *self.reported_held.lock() += 1;
    }
}

/// What has been written of a recording, to be looked at from outside.
#[derive(Clone, Default)]
pub(crate) struct Shown(pub Arc<Mutex<Vec<u8>>>);

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shown {
    pub(crate) fn reader(&self) -> Reader<Cursor<Vec<u8>>> {
        Reader::new(Cursor::new(self.0.lock().clone())).unwrap()
    }

    pub(crate) fn trace(&self) -> Trace {
        Trace::read(Cursor::new(self.0.lock().clone())).unwrap()
    }
}

/// A guest of 384 MiB with 128 MiB of DRAM and 1 GiB of PM to come.
pub(crate) struct Fixture {
    pub core: Core,
    pub dram: Arc<FakeDevice>,
    pub pm: Arc<FakeDevice>,
    /// The number of the last report.
    pub seq: u64,
}

pub(crate) fn fixture(policy: &str, dry_run: bool, follows: bool) -> Fixture {
    let (dram, pm) = (FakeDevice::new(128 * MIB, follows), FakeDevice::new(1024 * MIB, follows));
    let zone = |id: &str, tier, node, device: &Arc<FakeDevice>| GovernedZone {
        id: id.to_owned(),
        tier,
        guest_numa_node: node,
        boot_bytes: if node == 0 { 384 * MIB } else { 0 },
        device: Arc::clone(device) as _,
    };
    let zones = vec![zone("dram", Tier::Dram, 0, &dram), zone("pm", Tier::Pm, 1, &pm)];
    let config = PressureConfig { policy: policy.to_owned(), dry_run, ..Default::default() };
    let core = Core::new(&config, zones, 384 * MIB, Arc::new(|| 1024 * MIB), TimeMs(0)).unwrap();
    Fixture { core, dram, pm, seq: 0 }
}

impl Core {
    pub fn counters(&self) -> &Counters {
        self.governor.counters()
    }

    pub fn agent_state(&self, now: TimeMs) -> AgentState {
        self.governor.agent_state(now)
    }

    /// Time after which a guest without progress is late.
    pub fn progress_ms(&self) -> u64 {
        self.governor.controller().rules().progress_ms
    }

    /// Sizes a zone by hand.
    pub fn resize_zone(&mut self, id: &str, bytes: u64, now: TimeMs) -> Result<(), GovernorError> {
        let target = self.zones().target(id, bytes)?;
        self.resize(target, now)
    }

    /// A line of the agent, parsed here.
    pub fn line(
        &mut self,
        line: Result<&[u8], Refusal>,
        now: TimeMs,
        with_sleep: TimeMs,
        took: impl FnOnce() -> Duration,
    ) {
        self.message(line.and_then(balloon::parse_line), now, with_sleep, took);
    }
}

/// Serves an agent on one thread, which parses and decides.
pub(super) async fn serve(
    stream: UnixStream,
    core: &RefCell<Core>,
    clock: &Clock,
    budget: &mut LineBudget,
) -> std::io::Result<()> {
    let decide = async |Heard { message, at }: Heard| {
        core.borrow_mut().message(message, clock.now(), clock.with_sleep(), || at.elapsed());
    };
    let (settings, bytes) = (|| core.borrow().settings(), core.borrow().agent_bytes());
    agent::serve(stream, settings, &bytes, budget, balloon::parse_line, decide).await
}

impl Fixture {
    pub(crate) fn greet(&mut self) {
        self.core.agent_connected(TimeMs(self.seq * 50));
        self.line(&hello());
    }

    pub(crate) fn line(&mut self, line: &Value) {
        self.bytes(Ok(line.to_string().as_bytes()), TimeMs(self.seq * 50));
    }

    /// A line, or none, of an agent on a host that has never slept.
    pub(crate) fn bytes(&mut self, line: Result<&[u8], Refusal>, now: TimeMs) {
        self.core.line(line, now, now, Duration::default);
    }

    /// A report of a guest that has `available` of what it has in all.
    pub(crate) fn report(&mut self, available_mib: u64) {
        self.seq += 1;
        let plugged = [self.dram.sizes().plugged_bytes, self.pm.sizes().plugged_bytes];
        self.line(&report(self.seq, available_mib, plugged));
    }

    /// A first report of a guest that has room for the page descriptors of a part of its PM.
    pub(crate) fn report_little_free_memory(&mut self) {
        const FREE_PAGES: u64 = 4_500;
        let mut line = report(1, 16, [0, 0]);
        line["zones"][0]["free_pages"] = FREE_PAGES.into();
        line["memory"]["free_bytes"] = (FREE_PAGES * 4096).into();
        self.line(&line);
    }
}

/// What an agent says first.
pub(crate) fn hello() -> Value {
    json!({
        "type": "hello", "version": 1, "agent_version": "0.1.0", "kernel_release": "6.12.117",
        "preemption": "voluntary", "page_size_bytes": 4096,
    })
}

/// A report of a guest with so much plugged of DRAM and PM.
pub(crate) fn report(seq: u64, available_mib: u64, [dram, pm]: [u64; 2]) -> Value {
    let total = 360 * MIB + dram + pm;
    // The kernel's reserve is free but not available: page descriptors of all zones fit into it.
    let free_mib = available_mib.max(64);
    json!({
        "type": "report", "version": 1, "seq": seq, "monotonic_ms": seq * 50,
        "memory": {"total_bytes": total, "free_bytes": free_mib * MIB,
                   "available_bytes": available_mib * MIB},
        "zones": [{"node": 0, "kind": "dma32", "free_pages": free_mib * 256, "min_pages": 500,
                   "low_pages": 700, "high_pages": 900, "managed_pages": total / 4096}],
        "blocks": {"online_policy": "online_movable", "block_bytes": 128 * MIB, "nodes": [
            {"node": 0, "online_bytes": 384 * MIB + dram, "offline_bytes": 0, "movable_online_bytes": dram},
            {"node": 1, "online_bytes": pm, "offline_bytes": 0, "movable_online_bytes": pm},
        ]},
    })
}
