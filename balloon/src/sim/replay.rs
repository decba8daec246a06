//! Converts a recorded trace to the demand of the recorded guest.

use std::io::BufRead;

use foreshore_proto::{
    Counters, LINUX_RESERVE_RATIOS, Report, Zone, ZoneKind, reserve_ratios, reserved_pages,
};
use thiserror::Error;

use super::demand::{Demand, Segment};
use super::guest::{GuestConfig, boot_memory};
use super::host::VmSetup;
use super::storage::RecordedPool;
use crate::policy::Input;
use crate::policy::boot_memory::BootMemory;
use crate::policy::offlining::OffliningMemory;
use crate::report::is_by_agent;
use crate::trace::{Entry, Header, HostZone, Reader, RecordedPlan, TraceError};
use crate::units::{PAGE_BYTES, scale};
use crate::{HostView, MIB, Tier, TimeMs};

/// Maximum number of reports that are kept from a trace. A recording of the default size does not
/// have more.
const MAX_SAMPLES: usize = 1 << 20;

/// Time for which files count as read repeatedly after their evicted pages were read again.
const REREAD_MS: u64 = 3_600_000;
/// Period over which pages that are read again are counted in addition to the page cache. Such
/// pages belong to files that do not fit into the page cache.
const THRASH_MS: u64 = 1_000;

/// Reason why a trace cannot be replayed.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace has too few reports.
    #[error("the trace has {0} reports, must be at least 2")]
    Reports(u64),
    /// The recorded balloon could take all boot memory, but the simulated guest has no balloon.
    #[error(
        "the trace's guest booted with {0} bytes outside its balloon, must be at least 1048576"
    )]
    Boot(u64),
    /// The trace is too short.
    #[error("the trace's reports span {0} ms, must be at least 1000")]
    Short(u64),
}

/// Demand according to one report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DemandSample {
    at_ms: u64,
    anon_bytes: u64,
    kernel_bytes: u64,
    /// Size of the files that are read repeatedly.
    file_bytes: u64,
    /// Bytes of other files that have been read since the start of the trace.
    streamed_bytes: u64,
}

/// Kernel memory according to one report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KernelUsage {
    /// Slabs, page tables and stacks, without dentries and inodes that Linux can reclaim.
    needed_bytes: u64,
    /// Part of the kernel memory that is not available. If a report does not contain kernel memory,
    /// this part seems to be anonymous memory.
    used_bytes: u64,
}

impl DemandSample {
    /// Separates kernel memory from anonymous memory. If a report does not contain kernel memory,
    /// its anonymous memory includes it.
    fn separate(&mut self, kernel: KernelUsage) {
        let missing_bytes = kernel.used_bytes.saturating_sub(self.anon_bytes);
        self.anon_bytes = self.anon_bytes.saturating_sub(kernel.used_bytes);
        self.kernel_bytes = kernel.needed_bytes.saturating_sub(missing_bytes);
    }
}

/// Page cache and file reads, derived from successive reports.
#[derive(Debug, Default)]
struct Files {
    last: Option<(u64, Counters)>,
    /// Size of the page cache in the last report.
    cached_bytes: u64,
    /// Pages that were evicted and have not been read again. Negative if pages were read again that
    /// had been evicted before the first report.
    evicted_total_bytes: i128,
    /// Pages that were read again recently: a lower bound for the size of files that are read
    /// repeatedly.
    reread_bytes: u64,
    /// Pages that were read again within the last second.
    thrashing_bytes: u64,
    file_bytes: u64,
    /// Sum of all increases of `file_bytes`. These bytes were also read, but not from other files.
    growth_bytes: i128,
    streamed_bytes: u64,
}

impl Files {
    /// Prepares for reports from another source. Its first report shows `cached_bytes` of page
    /// cache. Counters from the new source started at another time, and it may count page cache
    /// differently. Such differences are not changes in the guest.
    fn change_reporter(&mut self, cached_bytes: u64) {
        self.last = None;
        self.evicted_total_bytes += i128::from(self.cached_bytes) - i128::from(cached_bytes);
    }

    /// Updates the values from a report. Each page that was added to the page cache is still there,
    /// or was evicted. It was either read for the first time, or had been evicted before. A report
    /// does not show pages that are dropped because their file is deleted. Later reads of the same
    /// amount count as their replacement.
    fn update(&mut self, at_ms: u64, cached_bytes: u64, counters: &Counters) {
        if let Some((last_ms, last)) = &self.last {
            // The counters restart at 0 if the kernel boots again.
            let bytes = |count: fn(&Counters) -> u64| {
                count(counters).saturating_sub(count(last)).saturating_mul(PAGE_BYTES)
            };
            let refaulted_bytes = bytes(|counters| counters.workingset_refault_file);
            let reclaimed_bytes = bytes(|counters| counters.pgsteal_kswapd)
                .saturating_add(bytes(|counters| counters.pgsteal_direct));
            let evicted_bytes = reclaimed_bytes.saturating_sub(bytes(|counters| counters.pswpout));
            self.evicted_total_bytes += i128::from(evicted_bytes) - i128::from(refaulted_bytes);
            let passed_ms = at_ms.saturating_sub(*last_ms);
            for (sum, ms) in
                [(&mut self.reread_bytes, REREAD_MS), (&mut self.thrashing_bytes, THRASH_MS)]
            {
                *sum = (*sum - scale(*sum, passed_ms.min(ms), ms)).saturating_add(refaulted_bytes);
            }
        }
        self.last = Some((at_ms, *counters));
        self.cached_bytes = cached_bytes;
        let file_bytes = self.reread_bytes.min(cached_bytes.saturating_add(self.thrashing_bytes));
        self.growth_bytes += i128::from(file_bytes.saturating_sub(self.file_bytes));
        self.file_bytes = file_bytes;
        let read_bytes = i128::from(cached_bytes) + self.evicted_total_bytes - self.growth_bytes;
        self.streamed_bytes = self.streamed_bytes.max(u64::try_from(read_bytes).unwrap_or(0));
    }
}

/// Memory that the guest is about to unplug. The memory seems to be in use, but it is not part of
/// the demand.
struct UnpluggingMemory {
    host: HostView,
    boot_memory: BootMemory,
    offlining: OffliningMemory,
    /// Memory that was being unplugged at the last report.
    offlining_bytes: u64,
}

impl UnpluggingMemory {
    fn new(header: &Header) -> Self {
        let mut host = HostView { boot_bytes: header.boot_bytes, ..HostView::default() };
        host.zones = header.zones.clone();
        UnpluggingMemory {
            host,
            boot_memory: BootMemory::default(),
            offlining: OffliningMemory::default(),
            offlining_bytes: 0,
        }
    }

    /// Updates the sizes of the zones on the host.
    fn set_sizes(&mut self, zones: &[HostZone]) {
        for (zone, sizes) in self.host.zones.iter_mut().zip(zones) {
            zone.requested_bytes = sizes.requested_bytes;
            zone.plugged_bytes = sizes.plugged_bytes;
        }
    }

    /// Updates the requested sizes after a plan was carried out.
    fn apply_plan(&mut self, plan: &RecordedPlan) {
        for (zone, (_, requested_bytes)) in self.host.zones.iter_mut().zip(&plan.targets) {
            zone.requested_bytes = *requested_bytes;
        }
    }

    /// Updates the state from a report, and returns the part of its used memory that is being
    /// unplugged. This part is the increase of used memory that is not anonymous, up to the amount
    /// that has to be unplugged. Balloon statistics do not report anonymous memory, so with them
    /// every increase counts.
    fn update(&mut self, at: TimeMs, used: &UsedMemory, report: &Report) -> u64 {
        let memory = report.memory();
        self.boot_memory.learn(Input { report, host: &self.host, is_carried_out: true }, at);
        let online_bytes = self.boot_memory.online_bytes(memory.total_bytes, &self.host);
        let pending_unplug_bytes = online_bytes.saturating_sub(self.host.requested_bytes());
        let offlining_bytes =
            self.offlining.learn(Self::other_bytes(used, report), pending_unplug_bytes);
        self.offlining_bytes = offlining_bytes.min(used.anon_bytes);
        self.offlining_bytes
    }

    /// Prepares for reports from another source. `report` is the first of them. The source may
    /// count used memory differently, so only the amount of memory that is being unplugged is kept.
    fn change_reporter(&mut self, used: &UsedMemory, report: &Report) {
        self.offlining = OffliningMemory::after_source_change(
            Self::other_bytes(used, report),
            self.offlining_bytes,
        );
    }

    /// Returns the used memory that is not anonymous.
    fn other_bytes(used: &UsedMemory, report: &Report) -> i128 {
        let memory = report.memory();
        let swapped_bytes = memory.swap_total_bytes - memory.swap_free_bytes;
        let anon_and_swap_bytes = memory.anon_bytes.saturating_add(swapped_bytes);
        i128::from(used.anon_bytes) - i128::from(anon_and_swap_bytes)
    }
}

/// Demand at the times of reports. The number of reports is limited.
struct DemandSamples {
    samples: Vec<DemandSample>,
    max_len: usize,
    /// Kernel memory in the last report that contained it.
    kernel: Option<KernelUsage>,
}

impl DemandSamples {
    fn new(max_len: usize) -> Self {
        DemandSamples { samples: Vec::new(), max_len, kernel: None }
    }

    /// Adds a report. `sample` does not include kernel memory, and `kernel` is the kernel memory in
    /// the report. If the report does not contain it, the value is taken from the last report that
    /// does, or else from the first. Otherwise, kernel memory would seem to grow when another
    /// source starts to report it.
    fn push(&mut self, mut sample: DemandSample, kernel: Option<KernelUsage>) {
        match (kernel, self.kernel) {
            (Some(first), None) => {
                self.samples.iter_mut().for_each(|sample| sample.separate(first))
            }
            (None, Some(last)) => sample.separate(last),
            _ => {}
        }
        if let Some(kernel) = kernel {
            sample.kernel_bytes = kernel.needed_bytes;
            self.kernel = Some(kernel);
        }
        // If two reports have the same time in milliseconds, the later one is used.
        if self.samples.last().is_some_and(|last| last.at_ms == sample.at_ms) {
            self.samples.pop();
        }
        if self.samples.len() >= self.max_len {
            self.thin_out();
        }
        self.samples.push(sample);
    }

    /// Divides the time into equal intervals, and keeps only the minimum and maximum of each, and
    /// the first and last report. Later reports are all kept until the limit is reached again.
    fn thin_out(&mut self) {
        let (Some(first), Some(last)) =
            (self.samples.first().copied(), self.samples.last().copied())
        else {
            return;
        };
        let intervals = (self.max_len / 4).max(1) as u64;
        let interval_ms = (last.at_ms + 1).div_ceil(intervals);
        let mut kept = vec![first];
        for interval in self.samples.chunk_by(|a, b| a.at_ms / interval_ms == b.at_ms / interval_ms)
        {
            let used_bytes =
                |sample: &&DemandSample| sample.anon_bytes.saturating_add(sample.kernel_bytes);
            let least = interval.iter().min_by_key(used_bytes);
            let most = interval.iter().max_by_key(used_bytes);
            let mut both: Vec<DemandSample> = least.into_iter().chain(most).copied().collect();
            both.sort_by_key(|sample| sample.at_ms);
            kept.extend(both);
        }
        kept.push(last);
        kept.dedup();
        self.samples = kept;
    }
}

/// Returns the VM of a trace with the demand of the recorded guest, and its pool.
/// `guest` contains the settings that are not in a trace. A long trace is never held in memory as a
/// whole.
///
/// If the recorded guest was short of memory, it had less memory than it needed. The trace does not
/// show memory that tasks waited for, so the demand is a lower bound. Swapped memory counts as
/// demand. Files whose evicted pages were read again count as read repeatedly. Other files that
/// were added to the page cache count as read once.
pub fn replay(
    trace: &mut Reader<impl BufRead>,
    guest: &GuestConfig,
    touches_per_s: u64,
    hot_permille: u64,
) -> Result<(VmSetup, RecordedPool), ReplayError> {
    let header = trace.header().clone();
    let mut samples = DemandSamples::new(MAX_SAMPLES);
    let (mut reports, mut first) = (0, None);
    let mut pool = RecordedPool::default();
    let (mut files, mut unplugging) = (Files::default(), UnpluggingMemory::new(&header));
    let mut was_by_agent = None;
    let mut add_report = |at: TimeMs, report: &Report, unplugging: &mut UnpluggingMemory| {
        reports += 1;
        let start = *first.get_or_insert(at);
        let (at_ms, used) = (at.since(start), UsedMemory::of(report, &header));
        let by_agent = is_by_agent(report);
        if was_by_agent.replace(by_agent).is_some_and(|before| before != by_agent) {
            files.change_reporter(used.cached_bytes);
            unplugging.change_reporter(&used, report);
        }
        files.update(at_ms, used.cached_bytes, report.counters());
        let Files { file_bytes, streamed_bytes, .. } = files;
        // The page cache at the start of the trace is read soon after the run starts.
        let streamed_bytes = if reports == 1 { 0 } else { streamed_bytes };
        let anon_bytes = used.anon_bytes - unplugging.update(at, &used, report);
        let sample =
            DemandSample { at_ms, anon_bytes, kernel_bytes: 0, file_bytes, streamed_bytes };
        samples.push(sample, used.kernel);
    };
    // After a report, the trace contains the host's sizes at the same time if they have changed,
    // and then the plan that was based on the report.
    let mut last: Option<(TimeMs, Box<Report>)> = None;
    for entry in trace {
        let entry = entry?;
        let is_of_last =
            matches!((&entry, &last), (Entry::Host { at, .. }, Some((of, _))) if at == of);
        if !is_of_last && let Some((at, report)) = last.take() {
            add_report(at, &report, &mut unplugging);
        }
        match entry {
            Entry::Report { at, report } => last = Some((at, report)),
            Entry::Host { at, zones, pool_free_bytes, storage } => {
                unplugging.set_sizes(&zones);
                pool.free_bytes.get_or_insert(pool_free_bytes);
                storage.iter().for_each(|storage| pool.observe(at, storage));
            }
            Entry::Plan { plan, .. } if !plan.dry_run => unplugging.apply_plan(&plan),
            Entry::Plan { .. } => {}
        }
    }
    if let Some((at, report)) = last {
        add_report(at, &report, &mut unplugging);
    }
    let samples = samples.samples;
    if reports < 2 {
        return Err(ReplayError::Reports(reports));
    }
    let last_ms = samples.last().map_or(0, |last| last.at_ms);
    if last_ms < 1000 {
        return Err(ReplayError::Short(last_ms));
    }
    let segments = samples.iter().zip(samples.iter().skip(1)).map(|(from, to)| {
        let ms = to.at_ms - from.at_ms;
        let rate = |from: u64, to: u64| {
            let bytes_per_s = (i128::from(to) - i128::from(from)) * 1000 / i128::from(ms);
            i64::try_from(bytes_per_s).unwrap_or(0)
        };
        Segment {
            at: TimeMs(from.at_ms),
            anon_bytes: from.anon_bytes,
            anon_bytes_per_s: rate(from.anon_bytes, to.anon_bytes),
            kernel_bytes: from.kernel_bytes,
            kernel_bytes_per_s: rate(from.kernel_bytes, to.kernel_bytes),
            file_bytes: from.file_bytes,
            stream_bytes_per_s: scale(to.streamed_bytes - from.streamed_bytes, 1000, ms),
            touches_per_s,
            hot_permille: hot_permille.min(1000),
        }
    });
    let demand = Demand::new(segments.collect(), TimeMs(last_ms)).expect("in order");
    let boot_bytes = header.boot_bytes;
    if boot_bytes < MIB {
        return Err(ReplayError::Boot(boot_bytes));
    }
    // A balloon of the recorded guest becomes hotplugged memory in the simulated guest.
    let mut host =
        HostView { boot_bytes, distances: header.distances.clone(), ..HostView::default() };
    host.zones = header.zones.clone();
    // The run starts with boot memory and the floors of the zones, as a guest does.
    for zone in &mut host.zones {
        zone.requested_bytes = zone.floor_bytes - zone.floor_bytes % zone.block_bytes;
        zone.plugged_bytes = zone.requested_bytes;
    }
    let all_pm = host.zones.iter().filter(|zone| zone.tier == Tier::Pm).map(|zone| zone.max_bytes);
    pool.free_bytes.get_or_insert_with(|| all_pm.sum());
    let guest = GuestConfig { boot_bytes: header.boot_bytes, ..guest.clone() };
    pool.started_at = first.unwrap_or_default();
    Ok((VmSetup { guest, host, demand }, pool))
}

/// Memory that the guest uses, according to one report.
struct UsedMemory {
    /// Used memory without page cache and the kernel's own memory, plus swapped memory. The used
    /// memory includes kernel memory if the report does not contain that.
    anon_bytes: u64,
    /// Kernel memory. `None` if the report does not contain it.
    kernel: Option<KernelUsage>,
    /// Page cache of files. Memory that processes share is not included.
    cached_bytes: u64,
}

impl UsedMemory {
    fn of(report: &Report, header: &Header) -> Self {
        let memory = report.memory();
        let swapped = memory.swap_total_bytes - memory.swap_free_bytes;
        let (mut high_pages, mut low_pages, mut all_kept_pages, mut descriptors) = (0, 0, 0, 0);
        let mut boot_pages =
            boot_memory(header.boot_bytes, &header.zones).managed_movable_bytes() / 4096;
        let serves_kernel =
            |node: u32| report.zones().iter().any(|zone| zone.node == node && zone.serves_kernel());
        // Older agents, which do not report the reserve, did not consider memory that can be
        // plugged.
        let ratios = reserve_ratios(report.zones(), 0, &LINUX_RESERVE_RATIOS);
        let kept = |zone: &Zone| {
            zone.protected_pages.unwrap_or_else(|| reserved_pages(zone, report.zones(), &ratios))
        };
        for zone in report.zones() {
            high_pages += zone.high_pages;
            low_pages += zone.low_pages;
            match zone.kind {
                ZoneKind::Movable => {
                    // The guest's total does not include the page descriptors of boot memory.
                    let of_boot = if serves_kernel(zone.node) {
                        boot_pages.min(zone.managed_pages)
                    } else {
                        0
                    };
                    boot_pages -= of_boot;
                    descriptors +=
                        ((zone.managed_pages - of_boot) * 4096).div_ceil(128 * MIB) * 2 * MIB;
                }
                _ => all_kept_pages += kept(zone),
            }
        }
        // MemAvailable does not include the watermarks and the reserve of boot memory. It also
        // leaves out half of the page cache, or the sum of the low watermarks if that is less
        // (mm/show_mem.c, si_mem_available()). Shared memory is not included either.
        let excluded_bytes = (high_pages + all_kept_pages) * 4096;
        let low_bytes = low_pages * 4096;
        let kernel = report.kernel().copied().unwrap_or_default();
        // MemAvailable includes reclaimable slabs in the same way as it includes page cache.
        let slab_bytes = kernel.slab_reclaimable_bytes;
        let excluded_slab_bytes = (slab_bytes / 2).min(low_bytes);
        let non_free_available_bytes =
            memory.available_bytes.saturating_add(excluded_bytes).saturating_sub(memory.free_bytes);
        let non_free_available_bytes =
            non_free_available_bytes.saturating_sub(slab_bytes - excluded_slab_bytes);
        let cached_bytes = memory
            .cached_bytes
            .min(non_free_available_bytes.saturating_add(non_free_available_bytes.min(low_bytes)));
        let excluded_cached_bytes = (cached_bytes / 2).min(low_bytes);
        // Page descriptors are used by the kernel.
        let kept = excluded_bytes + excluded_cached_bytes + descriptors;
        let used_kernel_bytes =
            (kernel.total_bytes() - slab_bytes).saturating_add(excluded_slab_bytes);
        let kept = kept.saturating_add(used_kernel_bytes);
        let anon_bytes =
            (memory.total_bytes - memory.available_bytes + swapped).saturating_sub(kept);
        // Linux reclaims dentries and inodes on LRU lists in the same way as page cache. Other
        // reclaimable slabs may be pinned, so the guest needs them (docs/reference/agent.md).
        let kernel = report.kernel().map(|kernel| KernelUsage {
            needed_bytes: kernel.total_bytes() - kernel.caches_bytes(),
            used_bytes: used_kernel_bytes,
        });
        UsedMemory { anon_bytes, kernel, cached_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(max_len: usize, sample: impl Iterator<Item = (u64, u64)>) -> Vec<DemandSample> {
        let mut samples = DemandSamples::new(max_len);
        for (at_ms, anon_bytes) in sample {
            samples.push(DemandSample { at_ms, anon_bytes, ..DemandSample::default() }, None);
            assert!(samples.samples.len() <= max_len, "{} of {max_len}", samples.samples.len());
        }
        samples.samples
    }

    #[test]
    fn samples_up_to_the_limit_are_kept_unchanged() {
        let all: Vec<_> = (0..64).map(|at| (at * 50, at % 7)).collect();
        let kept = pushed(64, all.iter().copied());
        assert!(kept.iter().map(|sample| (sample.at_ms, sample.anon_bytes)).eq(all));
    }

    #[test]
    fn later_of_two_samples_in_a_millisecond_counts() {
        let kept = pushed(64, [(0, 5), (7, 6), (7, 9), (8, 1)].into_iter());
        assert!(kept.iter().map(|sample| (sample.at_ms, sample.anon_bytes)).eq([
            (0, 5),
            (7, 9),
            (8, 1)
        ]));
    }

    #[test]
    fn thinning_keeps_start_end_and_peaks_at_their_times() {
        // The guest is at rest for hours, except for three bursts and a dip of one report each.
        let spikes = [(1_234, 900), (50_001, 800), (99_998, 700), (70_000, 1)];
        let level = |at: u64| {
            spikes.iter().find(|(spike, _)| *spike == at).map_or(100 + at % 3, |(_, v)| *v)
        };
        let kept = pushed(64, (0..100_000).map(|at| (at * 1_000, level(at))));
        assert_eq!(kept[0], DemandSample { anon_bytes: level(0), ..DemandSample::default() });
        assert_eq!(
            kept.last(),
            Some(&DemandSample {
                at_ms: 99_999_000,
                anon_bytes: level(99_999),
                ..DemandSample::default()
            })
        );
        for (at, anon_bytes) in spikes {
            assert!(
                kept.contains(&DemandSample {
                    at_ms: at * 1_000,
                    anon_bytes,
                    ..DemandSample::default()
                }),
                "{at}"
            );
        }
        assert!(kept.windows(2).all(|pair| pair[0].at_ms < pair[1].at_ms), "in order");
        assert!(kept.len() > 16, "a segment in between: {}", kept.len());
    }

    /// Results for reports at intervals of one second. Each report contains the cached MiB, and the
    /// MiB that were reclaimed and read again since the last report.
    fn demands_of(reports: &[(u64, u64, u64)]) -> Vec<(u64, u64)> {
        let (mut files, mut counters) = (Files::default(), Counters::default());
        let mut add_report = |(nth, (cached, reclaimed, back)): (usize, &(u64, u64, u64))| {
            counters.pgsteal_kswapd += reclaimed * 256;
            counters.workingset_refault_file += back * 256;
            files.update(nth as u64 * 1_000, cached * MIB, &counters);
            (files.file_bytes.div_ceil(MIB), files.streamed_bytes / MIB)
        };
        reports.iter().enumerate().map(&mut add_report).collect()
    }

    #[test]
    fn files_with_returning_pages_are_read_repeatedly_and_others_once() {
        // The guest reads 10 MiB per second, which first fill the page cache and then replace each
        // other.
        let filling = demands_of(&[(100, 0, 0), (110, 0, 0), (110, 10, 0), (110, 10, 0)]);
        assert_eq!(filling, [(0, 100), (0, 110), (0, 120), (0, 130)]);
        // If a file is deleted and written again, the page cache remains the same size.
        assert_eq!(
            demands_of(&[(100, 0, 0), (60, 0, 0), (100, 0, 0), (101, 0, 0)]).last(),
            Some(&(0, 101))
        );
        // Pages of the same 30 MiB evict each other and are read again. No other file is read.
        let thrashing = demands_of(&[
            (20, 0, 0),
            (20, 10, 10),
            (20, 10, 10),
            (20, 10, 10),
            (20, 10, 10),
            (20, 0, 0),
        ]);
        assert!(
            thrashing.iter().map(|sample| sample.0).eq([0, 10, 20, 30, 30, 20]),
            "{thrashing:?}"
        );
        assert!(thrashing.iter().all(|sample| sample.1 == 20), "{thrashing:?}");
        // The counters restart at 0 if the kernel boots again.
        let (mut files, mut counters) = (Files::default(), Counters::default());
        counters.pgsteal_kswapd = 1_000;
        files.update(0, 0, &counters);
        files.update(1_000, 0, &Counters::default());
        assert_eq!((files.file_bytes, files.streamed_bytes), (0, 0));
    }

    #[test]
    fn files_without_returning_pages_for_an_hour_do_not_count_as_read_repeatedly() {
        let mut reports = vec![(40, 0, 0), (40, 40, 40)];
        reports.resize(5 * 3_600, (40, 0, 0));
        let samples = demands_of(&reports);
        assert_eq!((samples[1].0, samples[3_600].0 < 16, samples[5 * 3_600 - 1].0), (40, true, 1));
    }

    /// A line of a trace: a report with its total, available and anonymous memory in MiB, sizes, or
    /// a plan. A report without anonymous memory is made from balloon statistics.
    enum Line {
        Report(u64, [u64; 3]),
        Sizes(u64, [u64; 2]),
        Plan(u64, u64, bool),
    }
    use Line::{Plan, Report, Sizes};

    /// Demand at each report of a guest of 1 GiB with 512 MiB of hotplugged DRAM. Each value is the
    /// difference to the first report, in MiB.
    fn wanted(lines: &[Line]) -> Vec<i64> {
        let zone = r#""id":0,"tier":"dram","guest_numa_node":0,"block_bytes":2097152,"floor_bytes":0,"max_bytes":536870912"#;
        let mut text = format!(
            r#"{{"type":"trace","version":1,"boot_bytes":1073741824,"zones":[{{{zone},"requested_bytes":536870912,"plugged_bytes":536870912}}]}}"#
        );
        let mib = |mib: &u64| mib * MIB;
        for (line, seq) in lines.iter().zip(1..) {
            text += "\n";
            text += &match line {
                Report(at, [total, available, anon]) => format!(
                    r#"{{"type":"report","at_ms":{at},"report":{{"version":1,"seq":{seq},"monotonic_ms":{at},"memory":{{"total_bytes":{},"free_bytes":{free},"available_bytes":{free},"anon_bytes":{}}},"zones":[{{"node":0,"kind":"{}","free_pages":0,"min_pages":0,"low_pages":0,"high_pages":0,"managed_pages":262144}}]}}}}"#,
                    mib(total),
                    mib(anon),
                    if *anon > 0 { "dma32" } else { "normal" },
                    free = mib(available),
                ),
                Sizes(at, [requested, plugged]) => format!(
                    r#"{{"type":"host","at_ms":{at},"pool_free_bytes":0,"zones":[{{"id":0,"requested_bytes":{},"plugged_bytes":{}}}]}}"#,
                    mib(requested),
                    mib(plugged),
                ),
                Plan(at, requested, dry_run) => format!(
                    r#"{{"type":"plan","at_ms":{at},"direction":"shrink","reason":"surplus","wanted_bytes":0,"dry_run":{dry_run},"zones":[{{"id":0,"requested_bytes":{}}}]}}"#,
                    mib(requested),
                ),
            };
        }
        text += "\n";
        let mut reader = Reader::new(text.as_bytes()).expect("sound");
        let (setup, _) = replay(&mut reader, &GuestConfig::default(), 0, 0).expect("sound");
        let (segments, end) = (setup.demand.segments(), setup.demand.end());
        let last = segments[segments.len() - 1].anon_bytes_at(end);
        let all = segments.iter().map(|segment| segment.anon_bytes).chain([last]);
        // The result is rounded, because rates are whole numbers of bytes per second.
        all.map(|bytes| (bytes as i64 - segments[0].anon_bytes as i64 + 1000) / MIB as i64)
            .collect()
    }

    #[test]
    fn memory_on_its_way_out_is_not_wanted() {
        // 500 of 1536 MiB are in use. Linux first removes a block from free memory, and 100 ms
        // later from the total.
        let shrinking = |plan, sizes| {
            wanted(&[
                Report(1_000, [1536, 1036, 400]),
                Report(4_000, [1536, 1036, 400]),
                plan,
                Report(4_500, [1536, 908, 400]),
                Report(4_550, [1536, 908, 400]),
                Report(4_600, [1408, 908, 400]),
                Sizes(4_610, sizes),
            ])
        };
        assert_eq!(shrinking(Plan(4_000, 384, false), [384, 384]), [0; 5]);
        // Broken variant: the host did not request the unplug.
        assert_eq!(shrinking(Plan(4_000, 384, true), [512, 512]), [0, 0, 128, 128, 0]);
        assert_eq!(shrinking(Plan(4_000, 512, false), [512, 512]), [0, 0, 128, 128, 0]);
        // Broken variant: the host requested the unplug of only a part of the memory.
        assert_eq!(shrinking(Plan(4_000, 448, false), [448, 384]), [0, 0, 64, 64, 0]);
    }

    #[test]
    fn memory_filled_while_other_memory_is_on_its_way_out_is_wanted() {
        let filling = wanted(&[
            Report(1_000, [1536, 1036, 400]),
            Report(4_000, [1536, 1036, 400]),
            Plan(4_000, 384, false),
            Report(4_500, [1536, 808, 500]),
            Report(4_600, [1408, 808, 500]),
            Sizes(4_600, [256, 384]),
            Report(5_000, [1408, 608, 572]),
            // If the request is withdrawn, the memory is not unplugged.
            Sizes(5_100, [384, 384]),
            Report(5_200, [1408, 736, 572]),
        ]);
        assert_eq!(filling, [0, 0, 100, 100, 172, 172]);
        // Without the anonymous memory, the two cases cannot be distinguished until the memory is
        // unplugged.
        let unknown = wanted(&[
            Report(1_000, [1536, 1036, 0]),
            Report(4_000, [1536, 1036, 0]),
            Plan(4_000, 384, false),
            Report(4_500, [1536, 808, 0]),
            Report(4_600, [1408, 808, 0]),
            Sizes(4_610, [384, 384]),
        ]);
        assert_eq!(unknown, [0, 0, 100, 100]);
    }

    #[test]
    fn memory_on_its_way_out_is_not_wanted_when_the_agent_takes_over() {
        let switching = wanted(&[
            Report(1_000, [1536, 1036, 0]),
            Report(4_000, [1536, 1036, 0]),
            Plan(4_000, 384, false),
            Report(4_500, [1536, 908, 0]),
            Report(4_550, [1536, 908, 400]),
            Report(4_600, [1408, 908, 400]),
            Sizes(4_610, [384, 384]),
        ]);
        assert_eq!(switching, [0; 5]);
    }

    #[test]
    fn sizes_at_the_time_of_a_report_apply_after_it() {
        // A client has requested a smaller size, which no plan shows.
        let by_hand = wanted(&[
            Report(1_000, [1536, 1036, 400]),
            Report(4_000, [1536, 1036, 400]),
            Report(4_500, [1536, 908, 400]),
            Sizes(4_500, [384, 512]),
            Report(4_550, [1536, 908, 400]),
            Sizes(4_560, [384, 384]),
            // This report was sent before the block was removed, and arrives after it.
            Report(4_561, [1536, 908, 400]),
            Report(4_600, [1408, 908, 400]),
        ]);
        assert_eq!(by_hand, [0; 6]);
    }

    /// Demand that results from replaying a guest of 1 GiB, in which 500 MiB are available and 300
    /// MiB of them are free. Every two seconds, a report also contains the next one of `parts`.
    fn demand_of(parts: &[&str]) -> Vec<Segment> {
        let mut text =
            String::from(r#"{"type":"trace","version":1,"boot_bytes":1073741824,"zones":[]}"#);
        for (part, seq) in parts.iter().zip(1..) {
            let at = seq * 2_000;
            text += &format!(
                "\n{{\"type\":\"report\",\"at_ms\":{at},\"report\":{{\"version\":1,\"seq\":{seq},\"monotonic_ms\":{at},{part}{}",
                r#""memory":{"total_bytes":1073741824,"free_bytes":314572800,"available_bytes":524288000,"cached_bytes":209715200,"anon_bytes":209715200},"zones":[{"node":0,"kind":"normal","free_pages":76800,"min_pages":500,"low_pages":2560,"high_pages":5120,"managed_pages":262144}]}}"#
            );
        }
        text += "\n";
        let mut reader = Reader::new(text.as_bytes()).expect("sound");
        let (setup, _) = replay(&mut reader, &GuestConfig::default(), 0, 0).expect("sound");
        setup.demand.segments().to_vec()
    }

    /// Anonymous and kernel memory in MiB, from a replay of [`demand_of`] in which reports contain
    /// `kernel`.
    fn wanted_with(kernel: &str) -> [u64; 2] {
        let first = demand_of(&[kernel; 2])[0];
        [first.anon_bytes, first.kernel_bytes].map(|bytes| bytes / MIB)
    }

    #[test]
    fn counters_and_kernel_memory_of_new_reporter_are_no_change() {
        let statistics = r#""counters":{"pgsteal_kswapd":1000},"#;
        // The guest has 100 MiB of unreclaimable slabs, and counters that have run for a year.
        let agent = r#""counters":{"pgsteal_kswapd":50000000,"workingset_refault_file":40000000},"blocks":{"block_bytes":134217728},"kernel":{"slab_unreclaimable_bytes":104857600,"slab_reclaimable_bytes":0,"page_table_bytes":0,"stack_bytes":0},"#;
        let demand = demand_of(&[statistics, statistics, agent, agent, statistics, statistics]);
        let first_stream = demand[0].stream_bytes_per_s;
        for segment in &demand {
            let figures = [segment.anon_bytes, segment.kernel_bytes, segment.file_bytes];
            assert_eq!(figures.map(|bytes| bytes / MIB), [394, 100, 0], "{segment:?}");
            assert_eq!(
                (segment.anon_bytes_per_s, segment.kernel_bytes_per_s),
                (0, 0),
                "{segment:?}"
            );
        }
        assert_eq!(first_stream, 100 * MIB, "page cache of the beginning");
        assert!(demand[1..].iter().all(|segment| segment.stream_bytes_per_s == 0), "{demand:?}");
    }

    #[test]
    fn reported_kernel_memory_is_demand_of_kernel_not_of_programs() {
        let kernel = |reclaimable_mib: u64, unused_dentries: u64| {
            wanted_with(&format!(
                r#""kernel":{{"slab_unreclaimable_bytes":{},"slab_reclaimable_bytes":{},"page_table_bytes":{},"stack_bytes":{},"unused_dentries":{unused_dentries},"unused_inodes":0}},"#,
                80 * MIB,
                reclaimable_mib * MIB,
                15 * MIB,
                5 * MIB,
            ))
        };
        // The watermarks and page cache account for 30 of the 524 MiB that are not available.
        let [anon_mib, none] = wanted_with("");
        assert_eq!((anon_mib, none), (494, 0), "an older agent");
        assert_eq!(kernel(0, 0), [394, 100]);
        // MemAvailable does not include 10 MiB of the reclaimable slabs, which is the low
        // watermark.
        assert_eq!(kernel(120, 0), [384, 220], "page cache and files in use pin them");
        assert_eq!(kernel(120, 120 * MIB / 192), [384, 100], "Linux can reclaim them");
    }
}
