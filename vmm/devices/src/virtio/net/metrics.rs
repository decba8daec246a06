//! Metrics of a network interface.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use prometheus_client::registry::Unit;

use super::tap::HostInterface;
use crate::device::{DeviceCounters, DeviceHandle, signed};
use crate::metrics::{Expose, Exposition, Family, Labels, and, one};

/// Direction in which a frame is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Sent by the guest.
    FromGuest,
    /// Received by the guest.
    ToGuest,
}

impl Direction {
    pub const ALL: [Self; 2] = [Self::FromGuest, Self::ToGuest];

    /// Value of the metric label `direction`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FromGuest => "from-guest",
            Self::ToGuest => "to-guest",
        }
    }
}

/// Reason to drop a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The host's interface refuses the frame, because the interface is down or the frame's header
    /// is invalid.
    Host,
    /// The driver's buffers are too small or not in memory.
    Buffers,
    /// The frame uses an offload that the driver has not negotiated.
    Offload,
    /// The driver's rings cannot be written.
    Ring,
    /// A page of memory that contained the frame is lost.
    Memory,
}

impl DropReason {
    pub const ALL: [Self; 5] = [Self::Host, Self::Buffers, Self::Offload, Self::Ring, Self::Memory];

    /// Value of the metric label `reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Buffers => "buffers",
            Self::Offload => "offload",
            Self::Ring => "ring",
            Self::Memory => "memory",
        }
    }
}

/// Number of frames, and of their bytes without the virtio header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub frames: u64,
    pub bytes: u64,
}

impl Traffic {
    fn since(self, start: Self) -> Self {
        let frames = self.frames.saturating_sub(start.frames);
        Self { frames, bytes: self.bytes.saturating_sub(start.bytes) }
    }
}

/// Source of the counters if the kernel transfers the frames.
struct Elsewhere {
    host: Weak<dyn HostInterface>,
    /// Values at the time when the device was created.
    start: Option<[Traffic; 2]>,
}

/// Counters of one interface. The counters never decrease.
#[derive(Default)]
pub struct NetMetrics {
    elsewhere: OnceLock<Elsewhere>,
    frames: [AtomicU64; 2],
    bytes: [AtomicU64; 2],
    dropped: [[AtomicU64; DropReason::ALL.len()]; 2],
    /// Buffer chains that are not valid frames, receive buffers or control commands.
    pub bad_requests: AtomicU64,
    /// Number of times that a queue was stopped because its ring was invalid. A reset makes the
    /// queue usable again.
    pub broken_queues: AtomicU64,
    /// Number of passes over the queues. Tests check that an idle worker makes no passes.
    #[cfg(test)]
    pub passes: AtomicU64,
}

impl fmt::Debug for NetMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let traffic = Direction::ALL.map(|direction| self.traffic(direction));
        f.debug_struct("NetMetrics").field("traffic", &traffic).finish_non_exhaustive()
    }
}

impl NetMetrics {
    /// Makes all later reads take the counters from `host`, because the kernel transfers the
    /// frames.
    pub fn leave_to(&self, host: &Arc<dyn HostInterface>) {
        let elsewhere = Elsewhere { host: Arc::downgrade(host), start: host.traffic() };
        assert!(
            self.elsewhere.set(elsewhere).is_ok(),
            "only one interface reports the frames of others"
        );
    }

    /// Returns true if the host's kernel transfers the frames.
    pub fn is_left_to_kernel(&self) -> bool {
        self.elsewhere.get().is_some()
    }

    /// Returns the transferred frames and bytes. Returns `None` if they are unknown.
    pub fn traffic(&self, direction: Direction) -> Option<Traffic> {
        let Some(Elsewhere { host, start }) = self.elsewhere.get() else {
            return Some(Traffic { frames: self.frames(direction), bytes: self.bytes(direction) });
        };
        let (now, start) = (host.upgrade()?.traffic()?, start.as_ref()?);
        Some(now[direction as usize].since(start[direction as usize]))
    }

    pub fn passed(&self, direction: Direction, bytes: usize) {
        self.frames[direction as usize].fetch_add(1, Ordering::Relaxed);
        self.bytes[direction as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn dropped(&self, direction: Direction, reason: DropReason, frames: u64) {
        self.dropped[direction as usize][reason as usize].fetch_add(frames, Ordering::Relaxed);
    }

    /// Number of frames that this process has delivered.
    pub fn frames(&self, direction: Direction) -> u64 {
        self.frames[direction as usize].load(Ordering::Relaxed)
    }

    /// Number of bytes in these frames, without the virtio header.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.bytes[direction as usize].load(Ordering::Relaxed)
    }

    /// Number of frames that this process has dropped.
    pub fn drops(&self, direction: Direction, reason: DropReason) -> u64 {
        self.dropped[direction as usize][reason as usize].load(Ordering::Relaxed)
    }
}

/// Counters and id of a network device, for the metrics endpoint.
#[derive(Clone, Debug)]
pub struct NetDeviceMetrics {
    pub net: String,
    pub counters: Arc<NetMetrics>,
}

impl NetDeviceMetrics {
    /// Exposes the known numbers of frames and bytes by direction.
    fn expose_traffic(&self, out: &mut Exposition, labels: &Labels) {
        let known = Direction::ALL.into_iter().filter_map(|direction| {
            let labels = and(labels, "direction", direction.as_str());
            Some((labels, self.counters.traffic(direction)?))
        });
        for (labels, traffic) in known {
            let frames = Family("net_frames", "Frames transferred.", None);
            out.counters(frames, [(labels.clone(), traffic.frames)]);
            let bytes = Family("net", "Bytes of the transferred frames.", Some(Unit::Bytes));
            out.counters(bytes, [(labels, traffic.bytes)]);
        }
    }

    fn expose_drops(&self, out: &mut Exposition, labels: &Labels) {
        let drops = Direction::ALL.into_iter().flat_map(|direction| {
            let labels = and(labels, "direction", direction.as_str());
            DropReason::ALL.map(|reason| {
                (and(&labels, "reason", reason.as_str()), self.counters.drops(direction, reason))
            })
        });
        out.counters(Family("net_dropped_frames", "Dropped frames.", None), drops);
    }
}

impl DeviceHandle for NetDeviceMetrics {
    /// Returns the traffic as seen by the guest.
    fn counters(&self) -> Option<DeviceCounters> {
        let names = [
            (Direction::ToGuest, ["rx_bytes", "rx_frames"]),
            (Direction::FromGuest, ["tx_bytes", "tx_frames"]),
        ];
        let mut counters = DeviceCounters::new();
        for (direction, [bytes, frames]) in names {
            // The traffic is unknown if vhost-net transfers the frames of a tap that another
            // program has opened.
            if let Some(traffic) = self.counters.traffic(direction) {
                counters.extend(signed([(bytes, traffic.bytes), (frames, traffic.frames)]));
            }
        }
        Some(counters)
    }
}

impl Expose for NetDeviceMetrics {
    fn expose(&self, out: &mut Exposition) {
        let labels = one("net", &self.net);
        let is_left_to_kernel = self.counters.is_left_to_kernel();
        let backend = if is_left_to_kernel { "vhost" } else { "vmm" };
        let family = Family(
            "net_backend",
            "Backend that transfers the frames of the interface; always 1.",
            None,
        );
        out.gauges(family, [(and(&labels, "backend", backend), 1.0)]);
        self.expose_traffic(out, &labels);
        // The kernel does not count frames that it drops on the way to the guest.
        if !is_left_to_kernel {
            self.expose_drops(out, &labels);
        }
        let get = |counter: &AtomicU64| [(labels.clone(), counter.load(Ordering::Relaxed))];
        let bad = Family(
            "net_bad_requests",
            "Buffer chains that are not a valid frame, receive buffer or control command.",
            None,
        );
        out.counters(bad, get(&self.counters.bad_requests));
        let broken = Family(
            "net_broken_queues",
            "Queues stopped until a reset because their rings were invalid.",
            None,
        );
        out.counters(broken, get(&self.counters.broken_queues));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tap::fake::FakeTap;
    use super::*;

    #[test]
    fn counters_of_vhost_are_those_of_the_interface() {
        let metrics = NetMetrics::default();
        metrics.passed(Direction::ToGuest, 100);
        assert_eq!(metrics.traffic(Direction::ToGuest), Some(Traffic { frames: 1, bytes: 100 }));
        let metrics = NetMetrics::default();
        let tap = FakeTap::new(1).0;
        let count = |frames| {
            Some([Traffic { frames, bytes: 60 * frames }, Traffic { frames: 7, bytes: 7 }])
        };
        *tap.traffic.lock() = count(5);
        let host: Arc<dyn HostInterface> = Arc::new(tap.clone());
        metrics.leave_to(&host);
        *tap.traffic.lock() = count(8);
        assert_eq!(metrics.traffic(Direction::FromGuest), Some(Traffic { frames: 3, bytes: 180 }));
        assert_eq!(metrics.traffic(Direction::ToGuest), Some(Traffic::default()));
        // The counters are unknown if the interface is in another network namespace or was removed.
        *tap.traffic.lock() = None;
        assert_eq!(metrics.traffic(Direction::FromGuest), None);
        *tap.traffic.lock() = count(8);
        drop(host);
        assert_eq!(metrics.traffic(Direction::FromGuest), None);
        assert!(metrics.is_left_to_kernel());
    }

    #[test]
    fn rx_counters_count_frames_to_the_guest() {
        let metrics = Arc::<NetMetrics>::default();
        metrics.passed(Direction::ToGuest, 100);
        metrics.passed(Direction::FromGuest, 60);
        metrics.passed(Direction::FromGuest, 60);
        let expected = [("rx_bytes", 100), ("rx_frames", 1), ("tx_bytes", 120), ("tx_frames", 2)];
        let device = NetDeviceMetrics { net: "a".to_owned(), counters: metrics };
        assert_eq!(DeviceHandle::counters(&device), Some(expected.into()));
    }
}
