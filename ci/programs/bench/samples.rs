//! Measured values.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Target {
    /// Foreshore's value may be at most this multiple of QEMU's.
    TimesQemu(f64),
    /// Foreshore's value may be at most this multiple of that without confinement.
    TimesUnconfined(f64),
    /// Maximum value, in the unit of the row.
    AtMost(f64),
    /// The measurement has no target.
    Open,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Seconds,
    Microseconds,
    Mebibytes,
    Ratio,
    Percent,
}

macro_rules! rows {
    ($($row:ident $target:ident $(($value:literal))? $key:literal $title:literal;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Row {
            $($row,)*
        }

        impl Row {
            pub(crate) const ALL: &[Self] = &[$(Self::$row,)*];

            /// Name for use by programs. The name ends with the unit.
            pub(crate) fn key(self) -> &'static str {
                match self {
                    $(Self::$row => $key,)*
                }
            }

            /// Name for readers.
            pub(crate) fn title(self) -> &'static str {
                match self {
                    $(Self::$row => $title,)*
                }
            }

            pub(crate) fn target(self) -> Target {
                match self {
                    $(Self::$row => Target::$target $(($value))?,)*
                }
            }
        }
    };
}

// STREAM on PM may be at most 1 % slower than in memory.
rows! {
    Boot TimesQemu(0.55) "boot_seconds" "exec to guest init";
    VmmMemory AtMost(7.0) "vmm_memory_mebibytes" "VMM memory beside the guest's";
    Plug TimesQemu(1.0) "plug_1_gib_seconds" "plug 1 GiB";
    Unplug TimesQemu(0.8) "unplug_1_gib_seconds" "unplug 1 GiB, never used";
    UnplugUsed Open "unplug_1_gib_used_seconds" "unplug 1 GiB, 700 MiB of it used before";
    DiskRead Open "disk_read_4_kib_depth_1_microseconds"
        "disk on tmpfs: random read of 4 KiB, one at a time";
    DiskWrite Open "disk_write_4_kib_depth_1_microseconds"
        "disk on tmpfs: random write of 4 KiB, one at a time";
    DiskReadDeep Open "disk_read_4_kib_depth_32_microseconds"
        "disk on tmpfs: random reads of 4 KiB, 32 in flight, time per read";
    DiskWriteDeep Open "disk_write_4_kib_depth_32_microseconds"
        "disk on tmpfs: random writes of 4 KiB, 32 in flight, time per write";
    NetToGuest Open "net_host_to_guest_64_mib_seconds" "TCP over a tap: 64 MiB to the guest";
    NetFromGuest Open "net_guest_to_host_64_mib_seconds" "TCP over a tap: 64 MiB from the guest";
    NetRoundTrip Open "net_round_trip_microseconds" "TCP over a tap: a byte to the guest and back";
    VhostToGuest Open "vhost_net_host_to_guest_64_mib_seconds"
        "TCP over a tap, by vhost-net: 64 MiB to the guest";
    VhostFromGuest Open "vhost_net_guest_to_host_64_mib_seconds"
        "TCP over a tap, by vhost-net: 64 MiB from the guest";
    VhostRoundTrip Open "vhost_net_round_trip_microseconds"
        "TCP over a tap, by vhost-net: a byte to the guest and back";
    NetBetween Open "net_guest_to_guest_64_mib_seconds"
        "TCP over two taps and a bridge: 64 MiB from guest to guest";
    NetBetweenRoundTrip Open "net_guest_to_guest_round_trip_microseconds"
        "TCP over two taps and a bridge: a byte to the other guest and back";
    ApiMedian Open "api_state_median_microseconds" "vm.info (QEMU: query-status), median of a run";
    ApiP99 Open "api_state_p99_microseconds"
        "vm.info (QEMU: query-status), 99th percentile of a run";
    NvdimmWrite TimesQemu(1.05) "nvdimm_write_4_kib_microseconds"
        "BTT, nvdimm on tmpfs: write 4 KiB";
    NvdimmRead TimesQemu(1.05) "nvdimm_read_4_kib_microseconds" "BTT, nvdimm on tmpfs: read 4 KiB";
    HintsWrite Open "nvdimm_flush_hints_write_4_kib_microseconds"
        "BTT, nvdimm with flush hints on ext4: write 4 KiB";
    HintsRead Open "nvdimm_flush_hints_read_4_kib_microseconds"
        "BTT, nvdimm with flush hints on ext4: read 4 KiB";
    VirtioPmemWrite Open "virtio_pmem_write_4_kib_microseconds"
        "BTT, virtio-pmem on tmpfs: write 4 KiB";
    VirtioPmemRead Open "virtio_pmem_read_4_kib_microseconds"
        "BTT, virtio-pmem on tmpfs: read 4 KiB";
    BlockWrite TimesQemu(1.0) "virtio_blk_image_write_4_kib_microseconds"
        "image on tmpfs, virtio-blk: write 4 KiB";
    BlockRead TimesQemu(1.0) "virtio_blk_image_read_4_kib_microseconds"
        "image on tmpfs, virtio-blk: read 4 KiB";
    EngineWrite Open "virtio_blk_btt_write_4_kib_microseconds"
        "BTT, virtio-blk on tmpfs: write 4 KiB";
    EngineRead Open "virtio_blk_btt_read_4_kib_microseconds" "BTT, virtio-blk on tmpfs: read 4 KiB";
    NvdimmUntar Open "nvdimm_untar_seconds" "F2FS on BTT, nvdimm on tmpfs: untar a tree";
    NvdimmTar Open "nvdimm_tar_seconds" "F2FS on BTT, nvdimm on tmpfs: tar it";
    VirtioPmemUntar Open "virtio_pmem_untar_seconds"
        "F2FS on BTT, virtio-pmem on tmpfs: untar a tree";
    VirtioPmemTar Open "virtio_pmem_tar_seconds" "F2FS on BTT, virtio-pmem on tmpfs: tar it";
    EngineUntar Open "virtio_blk_btt_untar_seconds"
        "F2FS on BTT, virtio-blk on tmpfs: untar a tree";
    EngineTar Open "virtio_blk_btt_tar_seconds" "F2FS on BTT, virtio-blk on tmpfs: tar it";
    ReportToPlan AtMost(0.001) "report_to_plan_median_seconds"
        "report to plan, upper bound of the median";
    ReportToPlanP99 AtMost(0.001) "report_to_plan_p99_seconds"
        "report to plan, upper bound of the 99th percentile";
    IdleWake Open "idle_thread_wake_median_seconds"
        "idle thread of the host during bursts: wake-up, median";
    IdleWakeP99 Open "idle_thread_wake_p99_seconds" "idle thread: wake-up, 99th percentile";
    IdleDecide Open "idle_thread_decide_median_seconds"
        "idle thread: to read a report and decide, median";
    IdleDecideP99 Open "idle_thread_decide_p99_seconds"
        "idle thread: to read a report and decide, 99th percentile";
    ReportToOnline Open "report_to_online_seconds" "first report under pressure to online";
    BurstToPlan Open "burst_to_plan_seconds" "burst of allocation to plan";
    BurstToOnline Open "burst_to_online_seconds" "burst of allocation to memory online";
    RequestToOnline Open "request_to_online_seconds"
        "API request of the same size to memory online";
    BurstOverRequest AtMost(0.1) "burst_over_request_seconds"
        "median of the burst minus median of the request";
    AgentCpu AtMost(0.2) "agent_at_rest_cpu_percent" "idle agent, share of a CPU";
    MonitorsCpu Open "agent_at_rest_damon_cpu_percent" "DAMON for the idle agent, share of a CPU";
    AgentRss AtMost(3.0) "agent_at_rest_resident_mebibytes" "idle agent, resident memory";
    ConfinedBoot TimesUnconfined(1.03) "confinement_boot_seconds" "exec to guest init";
    ConfinedMemory Open "confinement_anonymous_mebibytes" "anonymous memory of the VMM";
    ConfinedExit TimesUnconfined(1.03) "confinement_exit_microseconds" "read of PCI configuration space";
    ConfinedPlug TimesUnconfined(1.03) "confinement_plug_1_gib_seconds" "plug 1 GiB";
    ConfinedImageWrite TimesUnconfined(1.03) "confinement_image_write_4_kib_microseconds"
        "image, virtio-blk: write 4 KiB";
    ConfinedImageRead TimesUnconfined(1.03) "confinement_image_read_4_kib_microseconds"
        "image, virtio-blk: read 4 KiB";
    ConfinedEngineWrite TimesUnconfined(1.03) "confinement_virtio_blk_write_4_kib_microseconds"
        "BTT, virtio-blk: write 4 KiB";
    ConfinedEngineRead TimesUnconfined(1.03) "confinement_virtio_blk_read_4_kib_microseconds"
        "BTT, virtio-blk: read 4 KiB";
    ConfinedPmemWrite TimesUnconfined(1.03) "confinement_virtio_pmem_write_4_kib_microseconds"
        "BTT, virtio-pmem: write 4 KiB";
    ConfinedPmemRead TimesUnconfined(1.03) "confinement_virtio_pmem_read_4_kib_microseconds"
        "BTT, virtio-pmem: read 4 KiB";
    ConfinedNvdimmWrite TimesUnconfined(1.03) "confinement_nvdimm_write_4_kib_microseconds"
        "BTT, nvdimm: write 4 KiB";
    ConfinedNvdimmRead TimesUnconfined(1.03) "confinement_nvdimm_read_4_kib_microseconds"
        "BTT, nvdimm: read 4 KiB";
    ThinEngineWrite AtMost(1.02) "thin_virtio_blk_write_4_kib_ratio"
        "thin BTT, virtio-blk: write 4 KiB, relative to a thick one";
    ThinEngineRead AtMost(1.02) "thin_virtio_blk_read_4_kib_ratio"
        "thin BTT, virtio-blk: read 4 KiB, the same";
    ThinPmemWrite AtMost(1.02) "thin_virtio_pmem_write_4_kib_ratio"
        "thin BTT, virtio-pmem: write 4 KiB, the same";
    ThinPmemRead AtMost(1.02) "thin_virtio_pmem_read_4_kib_ratio"
        "thin BTT, virtio-pmem: read 4 KiB, the same";
    ThinNvdimmWrite AtMost(1.02) "thin_nvdimm_write_4_kib_ratio"
        "thin BTT, NVDIMM: write 4 KiB, the same";
    ThinNvdimmRead AtMost(1.02) "thin_nvdimm_read_4_kib_ratio"
        "thin BTT, NVDIMM: read 4 KiB, the same";
    StreamCopy AtMost(1.01) "stream_copy_devdax_ratio"
        "STREAM copy: time on a raw devdax volume, relative to pool memory";
    StreamScale AtMost(1.01) "stream_scale_devdax_ratio" "STREAM scale, the same";
    StreamAdd AtMost(1.01) "stream_add_devdax_ratio" "STREAM add, the same";
    StreamTriad AtMost(1.01) "stream_triad_devdax_ratio" "STREAM triad, the same";
    StreamFsdax Open "stream_triad_fsdax_ratio" "STREAM triad, raw volume with ext4 and DAX";
    StreamNoise Open "stream_triad_noise_ratio" "STREAM triad, pool memory relative to itself";
}

impl Row {
    pub(crate) fn unit(self) -> Unit {
        match self.key().rsplit('_').next() {
            Some("mebibytes") => Unit::Mebibytes,
            Some("microseconds") => Unit::Microseconds,
            Some("percent") => Unit::Percent,
            Some("ratio") => Unit::Ratio,
            _ => Unit::Seconds,
        }
    }

    /// Row with the QEMU values to compare with. QEMU's NVDIMM has no flush hints. It is the
    /// alternative to a BTT for users of QEMU. QEMU's disks are images, and their sectors may be
    /// torn.
    pub(crate) fn peer_row(self) -> Self {
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

/// Measured values, by row and VMM, in chronological order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(BTreeMap<(Row, String), Vec<f64>>);

impl Samples {
    pub(crate) fn add(&mut self, row: Row, vmm: &str, value: f64) {
        eprintln!("bench:   {}: {vmm}: {}", row.title(), row.unit().show(value));
        self.0.entry((row, vmm.to_owned())).or_default().push(value);
    }

    /// Adds the [`medians`] of several runs of `once`.
    pub(crate) fn add_medians<const ROWS: usize>(
        &mut self,
        rows: [Row; ROWS],
        vmm: &str,
        repeats: usize,
        once: impl FnMut() -> Result<[f64; ROWS]>,
    ) -> Result<()> {
        for (row, value) in rows.into_iter().zip(medians(repeats, once)?) {
            self.add(row, vmm, value);
        }
        Ok(())
    }

    pub(crate) fn of(&self, row: Row, vmm: &str) -> &[f64] {
        self.0.get(&(row, vmm.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// Names of the measured VMMs, with Foreshore and QEMU first.
    pub(crate) fn vmms(&self) -> Vec<String> {
        let mut names: Vec<String> = self.0.keys().map(|(_, vmm)| vmm.clone()).collect();
        names.sort_by_key(|name| {
            (name != super::vmm::FORESHORE, name != super::vmm::QEMU, name.clone())
        });
        names.dedup();
        names
    }
}

impl Unit {
    pub(crate) fn show(self, value: f64) -> String {
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

/// Returns the medians of several runs of `once`. An additional first run is discarded, because it
/// touches all memory for the first time.
pub(crate) fn medians<const VALUES: usize>(
    repeats: usize,
    mut once: impl FnMut() -> Result<[f64; VALUES]>,
) -> Result<[f64; VALUES]> {
    once()?;
    let runs = (0..repeats).map(|_| once()).collect::<Result<Vec<_>>>()?;
    let mut medians = [0.0; VALUES];
    for (index, value) in medians.iter_mut().enumerate() {
        let values: Vec<f64> = runs.iter().map(|run| run[index]).collect();
        *value = median(&values).context("No repeats")?;
    }
    Ok(medians)
}

/// Returns the median. For an even number of values, this is the mean of the middle two.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len.is_multiple_of(2) => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
        _ => Some(sorted[middle]),
    }
}

pub(crate) fn smallest(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

/// Returns the 99th percentile: the smallest value that at least 99 of 100 values do not exceed.
/// For fewer than 100 values, this is the largest value.
pub(crate) fn p99(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * 99).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_value_or_mean() {
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
