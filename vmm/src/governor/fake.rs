//! Fake devices that follow or ignore requests, and a governor that sizes two of them. Only for
//! tests.

use std::cell::RefCell;
use std::io::{self, Cursor, Write};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::time::Duration;

use balloon::governor::{AgentState, Counters};
use balloon::trace::{Reader, Trace};
use balloon::{DriverState, Tier, TimeMs, ZoneSizes};
use foreshore_devices::virtio::zone_device::ZoneDevice;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use super::agent::{self, Heard, LineBudget};
use super::core::{Core, ZoneQuery, ZoneState};
use super::task::Clock;
use super::{GovernedZone, GovernorError};
use crate::config::PressureConfig;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BLOCK: u64 = 2 * MIB;

pub(crate) const BOOT_BYTES: u64 = 384 * MIB;

/// Fake device that the governor can resize. Its guest follows requests immediately if `follows` is
/// set and its driver is ready.
pub(crate) struct FakeDevice {
    pub sizes: Mutex<ZoneSizes>,
    /// Number of calls of `sizes`.
    pub reads: Mutex<u32>,
    follows: bool,
    pub reminders: Mutex<u32>,
    /// Number of goals reported as unreachable.
    pub reported_held: Mutex<u32>,
}

impl FakeDevice {
    pub(crate) fn new(region_bytes: u64, follows: bool) -> Arc<Self> {
        let sizes = ZoneSizes::empty(0, Tier::Dram, region_bytes);
        Arc::new(Self {
            sizes: Mutex::new(sizes),
            reads: Mutex::default(),
            follows,
            reminders: Mutex::new(0),
            reported_held: Mutex::new(0),
        })
    }
}

impl ZoneDevice for FakeDevice {
    fn sizes(&self) -> ZoneSizes {
        *self.reads.lock() += 1;
        *self.sizes.lock()
    }
    fn request(&self, size_bytes: u64) {
        let mut sizes = self.sizes.lock();
        assert!(size_bytes <= sizes.max_bytes && size_bytes.is_multiple_of(BLOCK));
        (sizes.requested_bytes, sizes.held_bytes) = (size_bytes, 0);
        if self.follows && sizes.driver == DriverState::Ready {
            sizes.plugged_bytes = size_bytes;
        }
    }
    fn request_step(&self, size_bytes: u64, goal_bytes: u64) {
        self.request(size_bytes);
        self.sizes.lock().held_bytes = goal_bytes - size_bytes;
    }
    fn remind(&self) {
        *self.reminders.lock() += 1;
    }
    fn report_held(&self) {
        *self.reported_held.lock() += 1;
    }
}

/// Bytes written to a recording, shared with the test.
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

type OnLine = dyn FnMut(&str) + Send;

#[derive(Clone)]
struct Log(Arc<Mutex<OnLine>>);

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        (*self.0.lock())(&String::from_utf8_lossy(line));
        Ok(line.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs `act`, and passes each log line to `heard`.
pub(crate) fn with_log<R>(heard: impl FnMut(&str) + Send + 'static, act: impl FnOnce() -> R) -> R {
    let log = Log(Arc::new(Mutex::new(heard)));
    let writer = move || log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
    foreshore_devices::log::with_subscriber(subscriber, act)
}

pub(crate) fn logged(act: impl FnOnce()) -> Vec<String> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&lines);
    with_log(move |line| heard.lock().push(line.trim_end().to_owned()), act);
    std::mem::take(&mut *lines.lock())
}

/// Governor of a guest with 384 MiB of boot memory and zones for 128 MiB of DRAM and 1 GiB of PM.
pub(crate) struct Fixture {
    pub core: Core,
    pub dram: Arc<FakeDevice>,
    pub pm: Arc<FakeDevice>,
    pub seq: u64,
}

/// Adds a zone on a node of the guest. Boot memory is on node 0.
pub(crate) fn zone<D: ZoneDevice + 'static>(
    id: &str,
    tier: Tier,
    guest_numa_node: u32,
    device: &Arc<D>,
) -> GovernedZone {
    GovernedZone {
        id: id.to_owned(),
        tier,
        guest_numa_node,
        boot_bytes: if guest_numa_node == 0 { BOOT_BYTES } else { 0 },
        device: Arc::clone(device) as _,
    }
}

pub(crate) fn core(config: &PressureConfig, zones: Vec<GovernedZone>) -> Core {
    Core::new(config, zones, BOOT_BYTES, Arc::new(|| 1024 * MIB), TimeMs(0)).unwrap()
}

pub(crate) fn fixture(policy: &str, follows: bool) -> Fixture {
    let (dram, pm) = (FakeDevice::new(128 * MIB, follows), FakeDevice::new(1024 * MIB, follows));
    let zones = vec![zone("dram", Tier::Dram, 0, &dram), zone("pm", Tier::Pm, 1, &pm)];
    let config = PressureConfig { policy: policy.to_owned(), ..Default::default() };
    Fixture { core: core(&config, zones), dram, pm, seq: 0 }
}

impl Core {
    pub fn counters(&self) -> &Counters {
        self.governor.counters()
    }

    pub fn agent_state(&self, now: TimeMs) -> AgentState {
        self.governor.agent_state(now)
    }

    /// State of a zone that does not grow by DIMMs.
    pub fn zone_state(&self, id: &str, now: TimeMs) -> ZoneState {
        let query = ZoneQuery { id: id.to_owned(), guest_node: 0, boot_bytes: 0, has_dimms: false };
        self.zone_states(&[query], now).remove(0)
    }

    /// Resizes a zone at a client's request.
    pub fn resize_zone(&mut self, id: &str, bytes: u64, now: TimeMs) -> Result<(), GovernorError> {
        let target = self.zones().target(id, bytes)?;
        self.resize(target, now)
    }

    /// Handles a line from the agent, on a host that has never slept.
    pub fn line(&mut self, line: &Value, now: TimeMs, took: impl FnOnce() -> Duration) {
        self.message(balloon::parse_line(line.to_string().as_bytes()), now, now, took);
    }
}

/// Runtime with a paused clock, which jumps to the next timer when all tasks wait. Tests with this
/// clock measure waits, but not computing time.
pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// Both ends of a connection: the agent's and the VMM's.
pub(crate) fn connection() -> (StdUnixStream, StdUnixStream) {
    let (agent, vmm) = StdUnixStream::pair().unwrap();
    vmm.set_nonblocking(true).unwrap();
    (agent, vmm)
}

/// Serves an agent on the calling thread, which also parses and decides. Returns the elapsed time
/// on the clock of the runtime.
pub(super) fn serve(stream: StdUnixStream, core: &RefCell<Core>, clock: &Clock) -> Duration {
    let decide = async |Heard { message, at }: Heard| {
        core.borrow_mut().message(message, clock.now(), clock.boottime(), || at.elapsed());
    };
    let (settings, bytes) = (|| core.borrow().settings(), core.borrow().agent_bytes());
    runtime().block_on(async {
        let (begin, mut budget) = (Instant::now(), LineBudget::new());
        let stream = UnixStream::from_std(stream).unwrap();
        agent::serve(stream, settings, &bytes, &mut budget, balloon::parse_line, decide)
            .await
            .unwrap();
        begin.elapsed()
    })
}

impl Fixture {
    pub(crate) fn greet(&mut self) {
        self.core.agent_connected(TimeMs(self.seq * 50));
        self.line(&hello());
    }

    /// Applies a `vm.pressure` change.
    pub(crate) fn change(&mut self, change: Value) -> Result<(), String> {
        let change = serde_json::from_value(change).unwrap();
        self.core.change(&change, TimeMs(0)).map_err(|error| error.to_string())
    }

    pub(crate) fn line(&mut self, line: &Value) {
        self.core.line(line, TimeMs(self.seq * 50), Duration::default);
    }

    /// Reports that the guest has `available_mib` of available memory.
    pub(crate) fn report(&mut self, available_mib: u64) {
        self.seq += 1;
        let plugged = [self.dram.sizes().plugged_bytes, self.pm.sizes().plugged_bytes];
        self.line(&report(self.seq, available_mib, plugged));
    }
}

pub(crate) fn hello() -> Value {
    json!({
        "type": "hello", "version": 1, "agent_version": "0.1.0", "kernel_release": "6.12.117",
        "preemption": "voluntary", "page_size_bytes": 4096,
    })
}

/// Report of a guest with these plugged sizes of DRAM and PM.
pub(crate) fn report(seq: u64, available_mib: u64, [dram, pm]: [u64; 2]) -> Value {
    let total = 360 * MIB + dram + pm;
    // The kernel's reserve is free memory, but not available memory. It is large enough for the
    // page descriptors of all zones.
    let free_mib = available_mib.max(64);
    json!({
        "type": "report", "version": 1, "seq": seq, "monotonic_ms": seq * 50,
        "memory": {"total_bytes": total, "free_bytes": free_mib * MIB,
                   "available_bytes": available_mib * MIB},
        "zones": [{"node": 0, "kind": "dma32", "free_pages": free_mib * 256, "min_pages": 500,
                   "low_pages": 700, "high_pages": 900, "managed_pages": total / 4096}],
        "blocks": {"online_policy": "online_movable", "block_bytes": 128 * MIB, "nodes": [
            {"node": 0, "online_bytes": BOOT_BYTES + dram, "offline_bytes": 0, "movable_online_bytes": dram},
            {"node": 1, "online_bytes": pm, "offline_bytes": 0, "movable_online_bytes": pm},
        ]},
    })
}
