//! What was measured.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Row {
    Boot,
    VmmMemory,
    Plug,
    Unplug,
    UnplugUsed,
    NvdimmWrite,
    NvdimmRead,
    HintsWrite,
    HintsRead,
    VirtioPmemWrite,
    VirtioPmemRead,
    DiskRead,
    DiskWrite,
    DiskReadDeep,
    DiskWriteDeep,
    NetToGuest,
    NetFromGuest,
    NetRoundTrip,
    VhostToGuest,
    VhostFromGuest,
    VhostRoundTrip,
    NetBetween,
    NetBetweenRoundTrip,
    ApiMedian,
    ApiP99,
    BlockWrite,
    BlockRead,
    EngineWrite,
    EngineRead,
    NvdimmUntar,
    NvdimmTar,
    VirtioPmemUntar,
    VirtioPmemTar,
    EngineUntar,
    EngineTar,
    ReportToPlan,
    ReportToPlanP99,
    IdleWake,
    IdleWakeP99,
    IdleDecide,
    IdleDecideP99,
    ReportToOnline,
    BurstToPlan,
    BurstToOnline,
    RequestToOnline,
    BurstOverRequest,
    AgentCpu,
    MonitorsCpu,
    AgentRss,
    StreamCopy,
    StreamScale,
    StreamAdd,
    StreamTriad,
    StreamFsdax,
    StreamNoise,
}

/// What a row should be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// So many times what QEMU takes.
    TimesQemu(f64),
    /// In the row's unit.
    AtMost(f64),
    /// None is set.
    Open,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Microseconds,
    Mebibytes,
    Ratio,
    Percent,
}

impl Row {
    pub const ALL: [Self; 55] = [
        Self::Boot,
        Self::VmmMemory,
        Self::Plug,
        Self::Unplug,
        Self::UnplugUsed,
        Self::DiskRead,
        Self::DiskWrite,
        Self::DiskReadDeep,
        Self::DiskWriteDeep,
        Self::NetToGuest,
        Self::NetFromGuest,
        Self::NetRoundTrip,
        Self::VhostToGuest,
        Self::VhostFromGuest,
        Self::VhostRoundTrip,
        Self::NetBetween,
        Self::NetBetweenRoundTrip,
        Self::ApiMedian,
        Self::ApiP99,
        Self::NvdimmWrite,
        Self::NvdimmRead,
        Self::HintsWrite,
        Self::HintsRead,
        Self::VirtioPmemWrite,
        Self::VirtioPmemRead,
        Self::BlockWrite,
        Self::BlockRead,
        Self::EngineWrite,
        Self::EngineRead,
        Self::NvdimmUntar,
        Self::NvdimmTar,
        Self::VirtioPmemUntar,
        Self::VirtioPmemTar,
        Self::EngineUntar,
        Self::EngineTar,
        Self::ReportToPlan,
        Self::ReportToPlanP99,
        Self::IdleWake,
        Self::IdleWakeP99,
        Self::IdleDecide,
        Self::IdleDecideP99,
        Self::ReportToOnline,
        Self::BurstToPlan,
        Self::BurstToOnline,
        Self::RequestToOnline,
        Self::BurstOverRequest,
        Self::AgentCpu,
        Self::MonitorsCpu,
        Self::AgentRss,
        Self::StreamCopy,
        Self::StreamScale,
        Self::StreamAdd,
        Self::StreamTriad,
        Self::StreamFsdax,
        Self::StreamNoise,
    ];

    /// Its name for programs.
    pub fn key(self) -> &'static str {
        match self {
            Self::Boot => "boot_seconds",
            Self::VmmMemory => "vmm_memory_mebibytes",
            Self::Plug => "plug_1_gib_seconds",
            Self::Unplug => "unplug_1_gib_seconds",
            Self::UnplugUsed => "unplug_1_gib_used_seconds",
            Self::DiskRead => "disk_read_4_kib_depth_1_microseconds",
            Self::DiskWrite => "disk_write_4_kib_depth_1_microseconds",
            Self::DiskReadDeep => "disk_read_4_kib_depth_32_microseconds",
            Self::DiskWriteDeep => "disk_write_4_kib_depth_32_microseconds",
            Self::NetToGuest => "net_host_to_guest_64_mib_seconds",
            Self::NetFromGuest => "net_guest_to_host_64_mib_seconds",
            Self::NetRoundTrip => "net_round_trip_microseconds",
            Self::VhostToGuest => "vhost_net_host_to_guest_64_mib_seconds",
            Self::VhostFromGuest => "vhost_net_guest_to_host_64_mib_seconds",
            Self::VhostRoundTrip => "vhost_net_round_trip_microseconds",
            Self::NetBetween => "net_guest_to_guest_64_mib_seconds",
            Self::NetBetweenRoundTrip => "net_guest_to_guest_round_trip_microseconds",
            Self::ApiMedian => "api_state_median_microseconds",
            Self::ApiP99 => "api_state_p99_microseconds",
            Self::NvdimmWrite => "nvdimm_write_4_kib_microseconds",
            Self::NvdimmRead => "nvdimm_read_4_kib_microseconds",
            Self::HintsWrite => "nvdimm_flush_hints_write_4_kib_microseconds",
            Self::HintsRead => "nvdimm_flush_hints_read_4_kib_microseconds",
            Self::VirtioPmemWrite => "virtio_pmem_write_4_kib_microseconds",
            Self::VirtioPmemRead => "virtio_pmem_read_4_kib_microseconds",
            Self::BlockWrite => "virtio_blk_image_write_4_kib_microseconds",
            Self::BlockRead => "virtio_blk_image_read_4_kib_microseconds",
            Self::EngineWrite => "virtio_blk_btt_write_4_kib_microseconds",
            Self::EngineRead => "virtio_blk_btt_read_4_kib_microseconds",
            Self::NvdimmUntar => "nvdimm_untar_seconds",
            Self::NvdimmTar => "nvdimm_tar_seconds",
            Self::VirtioPmemUntar => "virtio_pmem_untar_seconds",
            Self::VirtioPmemTar => "virtio_pmem_tar_seconds",
            Self::EngineUntar => "virtio_blk_btt_untar_seconds",
            Self::EngineTar => "virtio_blk_btt_tar_seconds",
            Self::ReportToPlan => "report_to_plan_median_seconds",
            Self::ReportToPlanP99 => "report_to_plan_p99_seconds",
            Self::IdleWake => "idle_thread_wake_median_seconds",
            Self::IdleWakeP99 => "idle_thread_wake_p99_seconds",
            Self::IdleDecide => "idle_thread_decide_median_seconds",
            Self::IdleDecideP99 => "idle_thread_decide_p99_seconds",
            Self::ReportToOnline => "report_to_online_seconds",
            Self::BurstToPlan => "burst_to_plan_seconds",
            Self::BurstToOnline => "burst_to_online_seconds",
            Self::RequestToOnline => "request_to_online_seconds",
            Self::BurstOverRequest => "burst_over_request_seconds",
            Self::AgentCpu => "agent_at_rest_cpu_percent",
            Self::MonitorsCpu => "agent_at_rest_damon_cpu_percent",
            Self::AgentRss => "agent_at_rest_resident_mebibytes",
            Self::StreamCopy => "stream_copy_devdax_ratio",
            Self::StreamScale => "stream_scale_devdax_ratio",
            Self::StreamAdd => "stream_add_devdax_ratio",
            Self::StreamTriad => "stream_triad_devdax_ratio",
            Self::StreamFsdax => "stream_triad_fsdax_ratio",
            Self::StreamNoise => "stream_triad_noise_ratio",
        }
    }

    /// Its name for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::Boot => "exec to guest init",
            Self::VmmMemory => "VMM memory beside the guest's",
            Self::Plug => "plug 1 GiB",
            Self::Unplug => "unplug 1 GiB, never used",
            Self::UnplugUsed => "unplug 1 GiB, 700 MiB of it used before",
            Self::DiskRead => "disk on tmpfs: random read of 4 KiB, one at a time",
            Self::DiskWrite => "disk on tmpfs: random write of 4 KiB, one at a time",
            Self::DiskReadDeep => "disk on tmpfs: random read of 4 KiB, each of 32 at a time",
            Self::DiskWriteDeep => "disk on tmpfs: random write of 4 KiB, each of 32 at a time",
            Self::NetToGuest => "TCP over a tap: 64 MiB to the guest",
            Self::NetFromGuest => "TCP over a tap: 64 MiB from the guest",
            Self::NetRoundTrip => "TCP over a tap: a byte to the guest and back",
            Self::VhostToGuest => "TCP over a tap, by vhost-net: 64 MiB to the guest",
            Self::VhostFromGuest => "TCP over a tap, by vhost-net: 64 MiB from the guest",
            Self::VhostRoundTrip => "TCP over a tap, by vhost-net: a byte to the guest and back",
            Self::NetBetween => "TCP over two taps and a bridge: 64 MiB from guest to guest",
            Self::NetBetweenRoundTrip => {
                "TCP over two taps and a bridge: a byte to the other guest and back"
            }
            Self::ApiMedian => "vm.info (QEMU: query-status), median of a run",
            Self::ApiP99 => "vm.info (QEMU: query-status), 99th percentile of a run",
            Self::NvdimmWrite => "BTT, nvdimm on tmpfs: write 4 KiB",
            Self::NvdimmRead => "BTT, nvdimm on tmpfs: read 4 KiB",
            Self::HintsWrite => "BTT, nvdimm with flush hints on ext4: write 4 KiB",
            Self::HintsRead => "BTT, nvdimm with flush hints on ext4: read 4 KiB",
            Self::VirtioPmemWrite => "BTT, virtio-pmem on tmpfs: write 4 KiB",
            Self::VirtioPmemRead => "BTT, virtio-pmem on tmpfs: read 4 KiB",
            Self::BlockWrite => "image on tmpfs, virtio-blk: write 4 KiB",
            Self::BlockRead => "image on tmpfs, virtio-blk: read 4 KiB",
            Self::EngineWrite => "BTT, virtio-blk on tmpfs: write 4 KiB",
            Self::EngineRead => "BTT, virtio-blk on tmpfs: read 4 KiB",
            Self::NvdimmUntar => "F2FS on BTT, nvdimm on tmpfs: untar a tree",
            Self::NvdimmTar => "F2FS on BTT, nvdimm on tmpfs: tar it",
            Self::VirtioPmemUntar => "F2FS on BTT, virtio-pmem on tmpfs: untar a tree",
            Self::VirtioPmemTar => "F2FS on BTT, virtio-pmem on tmpfs: tar it",
            Self::EngineUntar => "F2FS on BTT, virtio-blk on tmpfs: untar a tree",
            Self::EngineTar => "F2FS on BTT, virtio-blk on tmpfs: tar it",
            Self::ReportToPlan => "report to plan, median, no more than",
            Self::ReportToPlanP99 => "report to plan, 99th percentile, no more than",
            Self::IdleWake => "idle thread of the host in the bursts: until it runs, median",
            Self::IdleWakeP99 => "idle thread: until it runs, 99th percentile",
            Self::IdleDecide => "idle thread: to read a report and decide, median",
            Self::IdleDecideP99 => "idle thread: to read a report and decide, 99th percentile",
            Self::ReportToOnline => "first report under pressure to online",
            Self::BurstToPlan => "burst of allocation to plan",
            Self::BurstToOnline => "burst of allocation to memory online",
            Self::RequestToOnline => "request of as much by the API to memory online",
            Self::BurstOverRequest => "the burst's median less the request's",
            Self::AgentCpu => "agent at rest, of a CPU",
            Self::MonitorsCpu => "DAMON on its behalf, of a CPU",
            Self::AgentRss => "agent at rest, resident",
            Self::StreamCopy => {
                "STREAM copy, raw volume by devdax: time of that in the pool's memory"
            }
            Self::StreamScale => "STREAM scale, the same",
            Self::StreamAdd => "STREAM add, the same",
            Self::StreamTriad => "STREAM triad, the same",
            Self::StreamFsdax => "STREAM triad, raw volume by ext4 with DAX",
            Self::StreamNoise => "STREAM triad, the pool's memory beside itself",
        }
    }

    pub fn unit(self) -> Unit {
        match self {
            Self::VmmMemory | Self::AgentRss => Unit::Mebibytes,
            Self::AgentCpu | Self::MonitorsCpu => Unit::Percent,
            Self::Boot
            | Self::Plug
            | Self::Unplug
            | Self::UnplugUsed
            | Self::NetToGuest
            | Self::NetFromGuest
            | Self::VhostToGuest
            | Self::VhostFromGuest
            | Self::NetBetween
            | Self::NvdimmUntar
            | Self::NvdimmTar
            | Self::VirtioPmemUntar
            | Self::VirtioPmemTar
            | Self::EngineUntar
            | Self::EngineTar
            | Self::ReportToPlan
            | Self::ReportToPlanP99
            | Self::IdleWake
            | Self::IdleWakeP99
            | Self::IdleDecide
            | Self::IdleDecideP99
            | Self::ReportToOnline
            | Self::BurstToPlan
            | Self::BurstToOnline
            | Self::RequestToOnline
            | Self::BurstOverRequest => Unit::Seconds,
            Self::StreamCopy
            | Self::StreamScale
            | Self::StreamAdd
            | Self::StreamTriad
            | Self::StreamFsdax
            | Self::StreamNoise => Unit::Ratio,
            _ => Unit::Microseconds,
        }
    }

    pub fn target(self) -> Target {
        match self {
            Self::Boot => Target::TimesQemu(0.55),
            Self::VmmMemory => Target::AtMost(7.0),
            Self::Plug => Target::TimesQemu(1.0),
            Self::Unplug => Target::TimesQemu(0.8),
            Self::NvdimmWrite | Self::NvdimmRead => Target::TimesQemu(1.05),
            // Within a percent of memory.
            Self::StreamCopy | Self::StreamScale | Self::StreamAdd | Self::StreamTriad => {
                Target::AtMost(1.01)
            }
            Self::ReportToPlan | Self::ReportToPlanP99 => Target::AtMost(0.001),
            Self::BurstOverRequest => Target::AtMost(0.1),
            Self::AgentCpu => Target::AtMost(0.2),
            Self::AgentRss => Target::AtMost(3.0),
            Self::BlockWrite | Self::BlockRead => Target::TimesQemu(1.0),
            _ => Target::Open,
        }
    }

    /// The row whose figures of QEMU this one is compared with: its NVDIMM has no flush hints, and
    /// is what its users have for a BTT; its disks have images, whose sectors may tear.
    pub fn peer_row(self) -> Self {
        match self {
            Self::HintsWrite | Self::VirtioPmemWrite => Self::NvdimmWrite,
            Self::HintsRead | Self::VirtioPmemRead => Self::NvdimmRead,
            Self::EngineWrite => Self::BlockWrite,
            Self::EngineRead => Self::BlockRead,
            Self::VirtioPmemUntar | Self::EngineUntar => Self::NvdimmUntar,
            Self::VirtioPmemTar | Self::EngineTar => Self::NvdimmTar,
            own => own,
        }
    }
}

/// Values by row and VMM, in the order they were measured.
#[derive(Clone, Debug, Default)]
pub struct Samples(BTreeMap<(Row, String), Vec<f64>>);

impl Samples {
    /// Adds a value and says it.
    pub fn add(&mut self, row: Row, vmm: &str, value: f64) {
        eprintln!("bench:   {}: {vmm}: {}", row.title(), row.unit().show(value));
        self.0.entry((row, vmm.to_owned())).or_default().push(value);
    }

    pub fn of(&self, row: Row, vmm: &str) -> &[f64] {
        self.0.get(&(row, vmm.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// The VMMs that were measured, Foreshore and QEMU first.
    pub fn vmms(&self) -> Vec<String> {
        let mut names: Vec<String> = self.0.keys().map(|(_, vmm)| vmm.clone()).collect();
        names.sort_by_key(|name| {
            (name != super::vmm::FORESHORE, name != super::vmm::QEMU, name.clone())
        });
        names.dedup();
        names
    }
}

impl Unit {
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Seconds if value < 0.01 => format!("{:.2} ms", value * 1e3),
            Self::Seconds if value < 0.1 => format!("{:.1} ms", value * 1e3),
            Self::Seconds => format!("{value:.2} s"),
            Self::Microseconds => format!("{value:.0} µs"),
            Self::Mebibytes => format!("{value:.1} MiB"),
            Self::Ratio => format!("{value:.3}"),
            Self::Percent => format!("{value:.3} %"),
        }
    }
}

/// The middle one; of an even number, the mean of the two in the middle.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len.is_multiple_of(2) => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
        _ => Some(sorted[middle]),
    }
}

pub fn smallest(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

/// The smallest that at least 99 of 100 are no larger than: the largest of fewer than a hundred.
pub fn p99(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * 99).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(smallest(&[3.0, 1.0, 2.0]), Some(1.0));
    }

    #[test]
    fn one_of_a_hundred_is_above_the_99th_percentile() {
        let up_to = |last: u32| (1..=last).rev().map(f64::from).collect::<Vec<f64>>();
        assert_eq!(p99(&[]), None);
        for (last, expected) in
            [(1, 1.0), (20, 20.0), (99, 99.0), (100, 99.0), (101, 100.0), (1000, 990.0)]
        {
            assert_eq!(p99(&up_to(last)), Some(expected), "of {last}");
        }
    }
}
