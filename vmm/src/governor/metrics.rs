//! Metrics of the governor and of the agent's reports.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use balloon::plan::{Direction, Reason};
use balloon::proto::{OnlinePolicy, Refusal, Report, Zone};
use foreshore_devices::metrics::{Expose, Exposition, Family, LatencySample, and, one};
use prometheus_client::registry::Unit;

use crate::governor::info::{GovernedZoneInfo, RecordingInfo, RecordingState};
use balloon::governor::AgentState;

/// Page size on x86-64, which is the unit of the guest's counters.
const PAGE_BYTES: u64 = 4096;

#[derive(Clone, Debug, Default)]
pub struct PressureSample {
    /// Number of plans by policy, direction and reason.
    pub plans_total: BTreeMap<(&'static str, &'static str, &'static str), u64>,
    /// Policies that the VM has used so far.
    pub policies: BTreeSet<&'static str>,
    pub reports_total: u64,
    /// Number of refused lines from the agent, by [`Refusal::label`].
    pub refused_total: BTreeMap<&'static str, u64>,
    pub connections_total: u64,
    pub agent_bytes_total: u64,
    /// Number of reminders sent to a guest that made no progress.
    pub reminders_total: u64,
    pub agent_connected: bool,
    pub agent: Option<AgentState>,
    pub zones: Vec<PressureZone>,
    /// Number of decisions so far, which is also the number of the latest decision.
    pub decisions_total: u64,
    pub recording: Option<RecordingInfo>,
    pub paused: bool,
    pub dry_run: bool,
    /// Available or free memory below which the agent reports more often. 0 before the first plan.
    pub watermark_bytes: u64,
    /// Software of the guest according to the hello of its agent. `None` if no agent is connected.
    pub guest: Option<GuestSoftware>,
    /// Latest report and its age.
    pub report: Option<(Duration, Report)>,
    /// Time from a report of the agent until the resulting requests to devices.
    pub report_to_plan: LatencySample,
    /// Time from the report that caused a grow until the memory is online.
    pub report_to_online: LatencySample,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestSoftware {
    /// `uname -r`.
    pub kernel: String,
    /// Version of the agent.
    pub agent: String,
}

impl GuestSoftware {
    /// Longest label value, as long as the longest release of a Linux kernel.
    const MAX_CHARS: usize = 64;

    /// Creates label values from the texts of a guest, which is not trusted. Texts are cut, and
    /// characters that a version does not need are replaced.
    pub fn new(kernel: &str, agent: &str) -> Self {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
        let value = |text: &str| {
            let plain = text.chars().map(|c| if is_plain(c) { c } else { '_' });
            plain.take(Self::MAX_CHARS).collect()
        };
        Self { kernel: value(kernel), agent: value(agent) }
    }
}

/// Software of a guest since its boot. Each change creates a series, so their number is limited.
#[derive(Debug, Default)]
pub struct GuestSoftwareHistory {
    last: Option<GuestSoftware>,
    changes: u32,
}

impl GuestSoftwareHistory {
    /// Number of changes that are followed, for example updates of the agent, and kernels started
    /// by kexec.
    const MAX_CHANGES: u32 = 4;

    /// Stores `software`.
    pub fn update(&mut self, software: GuestSoftware) {
        if self.last.as_ref() != Some(&software) {
            self.changes += u32::from(self.last.is_some());
            self.last = Some(software);
        }
    }

    /// Returns the present software, or `None` if it has changed too often since the boot.
    pub fn shown(&self) -> Option<&GuestSoftware> {
        self.last.as_ref().filter(|_| self.changes <= Self::MAX_CHANGES)
    }
}

#[derive(Clone, Debug)]
pub struct PressureZone {
    pub tier: &'static str,
    pub zone: GovernedZoneInfo,
}

pub trait PressureSource: fmt::Debug + Send + Sync {
    /// Current values. `None` if the governor has ended.
    fn sample(&self) -> Option<PressureSample>;
}

/// Metrics of a governor, which are exposed until the governor has ended.
#[derive(Debug)]
pub struct PressureMetrics(pub Weak<dyn PressureSource>);

impl Expose for PressureMetrics {
    fn expose(&self, out: &mut Exposition) {
        let Some(sample) = self.0.upgrade().and_then(|source| source.sample()) else { return };
        expose_governor(out, &sample);
        if let Some(recording) = &sample.recording {
            expose_recording(out, recording);
        }
        expose_agent(out, &sample);
        if let Some((age, report)) = &sample.report {
            let family = Family(
                "pressure_report_age",
                "Age of the last report, without the time in which the VM was paused or its host slept.",
                Some(Unit::Seconds),
            );
            out.gauges(family, [(vec![], age.as_secs_f64())]);
            expose_watermarks(out, report);
            expose_guest(out, report);
        }
    }
}

fn expose_governor(out: &mut Exposition, sample: &PressureSample) {
    expose_plans(out, sample);
    out.counters(
        Family("pressure_decisions", "Decisions of the governor, repetitions left out.", None),
        [(vec![], sample.decisions_total)],
    );
    let dry_run = Family("pressure_dry_run", "1 when plans are not carried out.", None);
    out.flags(dry_run, [(vec![], sample.dry_run)]);
    let paused =
        Family("pressure_paused", "1 when the governor is paused and makes no decisions.", None);
    out.flags(paused, [(vec![], sample.paused)]);
    let zones = |shown: fn(&GovernedZoneInfo) -> bool| {
        sample.zones.iter().map(move |PressureZone { tier, zone }| {
            (and(&one("zone", &zone.id), "tier", tier), shown(zone))
        })
    };
    let pinned =
        "1 when the zone was resized manually; the governor does not resize it until resumed.";
    out.flags(Family("pressure_pinned", pinned, None), zones(|zone| zone.pinned));
    let driver = "1 when the guest's driver for the zone's device is ready.";
    out.flags(Family("pressure_driver_ready", driver, None), zones(|zone| zone.driver_ready));
    out.counters(
        Family("pressure_reminders", "Reminders sent to a guest that made no progress.", None),
        [(vec![], sample.reminders_total)],
    );
    out.latencies(
        "pressure_report_to_plan",
        "Time from a report of the agent to the resulting requests to devices.",
        [(vec![], sample.report_to_plan.clone())],
    );
    out.latencies(
        "pressure_report_to_online",
        "Time from the report that led to a grow until the memory is online.",
        [(vec![], sample.report_to_online.clone())],
    );
}

/// Exposes every direction and reason from the start, with the value 0. `increase()` needs a sample
/// before the first increment. Otherwise it would miss the first plan of each kind.
fn expose_plans(out: &mut Exposition, sample: &PressureSample) {
    let of_policy = |policy: &'static str| {
        let reasons = move |direction: Direction| {
            Reason::ALL.iter().map(move |reason| (policy, direction.label(), reason.label()))
        };
        Direction::ALL.into_iter().flat_map(reasons)
    };
    let plans = sample.policies.iter().copied().flat_map(of_policy).map(|plan| {
        let (policy, direction, reason) = plan;
        let labels = [("policy", policy), ("direction", direction), ("reason", reason)];
        let count = sample.plans_total.get(&plan).copied().unwrap_or(0);
        (labels.map(|(name, value)| (name, value.to_owned())).to_vec(), count)
    });
    out.counters(Family("pressure_plans", "Plans of the governor.", None), plans);
}

fn expose_recording(out: &mut Exposition, recording: &RecordingInfo) {
    let goes_on = recording.status == RecordingState::Recording;
    let help = "1 while reports are recorded, 0 when the recording has ended.";
    out.flags(Family("pressure_recording", help, None), [(vec![], goes_on)]);
    out.counters(
        Family("pressure_recorded", "Size of the recording.", Some(Unit::Bytes)),
        [(vec![], recording.written_bytes)],
    );
    out.counters(
        Family(
            "pressure_recording_lost_lines",
            "Lines missing in the recording, because its file was too slow.",
            None,
        ),
        [(vec![], recording.lost_lines)],
    );
}

fn expose_agent(out: &mut Exposition, sample: &PressureSample) {
    let guest = sample
        .guest
        .iter()
        .map(|guest| (and(&one("kernel", &guest.kernel), "agent", &guest.agent), 1.0));
    out.gauges(
        Family("guest_info", "Kernel of the guest and version of its agent; always 1.", None),
        guest,
    );
    let connected = Family("pressure_agent_connected", "1 when an agent is connected.", None);
    out.flags(connected, [(vec![], sample.agent_connected)]);
    let states = AgentState::ALL
        .into_iter()
        .map(|state| (one("state", state.label()), sample.agent == Some(state)));
    out.flags(
        Family("pressure_agent_state", "1 for the state of the agent, 0 for all others.", None),
        states,
    );
    out.counters(
        Family("pressure_agent_connections", "Connections of agents.", None),
        [(vec![], sample.connections_total)],
    );
    out.counters(
        Family("pressure_agent", "Bytes that agents have sent.", Some(Unit::Bytes)),
        [(vec![], sample.agent_bytes_total)],
    );
    out.counters(
        Family("pressure_reports", "Reports that were accepted.", None),
        [(vec![], sample.reports_total)],
    );
    // Every reason is exposed from the start. Otherwise, alerts would miss its first occurrence.
    let refused = Refusal::LABELS.into_iter().map(|reason| {
        let count = sample.refused_total.get(reason).copied().unwrap_or(0);
        (vec![("reason", reason.to_owned())], count)
    });
    out.counters(
        Family("pressure_refused_reports", "Lines of the agent that were refused.", None),
        refused,
    );
    out.bytes(
        "pressure_report_watermark",
        "Memory below which the agent reports faster: available, or free if the policy uses that.",
        [(vec![], sample.watermark_bytes)],
    );
}

fn expose_watermarks(out: &mut Exposition, report: &Report) {
    type PagesOf = fn(&Zone) -> u64;
    let marks: [(&str, PagesOf); 3] = [
        ("min", |zone| zone.min_pages),
        ("low", |zone| zone.low_pages),
        ("high", |zone| zone.high_pages),
    ];
    let samples = marks.map(|(mark, pages)| {
        // The protocol limits each value and the number of values, so the sum cannot overflow. The
        // addition saturates nevertheless, because the values come from the guest.
        let pages = report.zones().iter().fold(0u64, |sum, zone| sum.saturating_add(pages(zone)));
        (one("watermark", mark), pages.saturating_mul(PAGE_BYTES))
    });
    out.bytes(
        "pressure_watermark",
        "Watermarks of the guest kernel, summed over all its memory zones.",
        samples,
    );
}

/// Exposes the memory used by the guest's kernel. Older agents do not report it.
fn expose_kernel(out: &mut Exposition, report: &Report) {
    let uses = report.kernel().map(|kernel| {
        [
            ("slab-unreclaimable", kernel.slab_unreclaimable_bytes),
            ("slab-reclaimable", kernel.slab_reclaimable_bytes),
            ("page-tables", kernel.page_table_bytes),
            ("stacks", kernel.stack_bytes),
        ]
    });
    let samples = uses.into_iter().flatten().map(|(kind, bytes)| (one("kind", kind), bytes));
    out.bytes("guest_kernel_memory", "Memory that the guest's kernel uses itself.", samples);
    let caches = report.kernel().map(|kernel| {
        [("unused-dentries", kernel.unused_dentries), ("unused-inodes", kernel.unused_inodes)]
    });
    let caches = caches.into_iter().flatten();
    let samples = caches.filter_map(|(kind, count)| Some((one("kind", kind), count? as f64)));
    out.gauges(
        Family(
            "guest_kernel_caches",
            "Unused dentries and inodes, which the guest's kernel can reclaim.",
            None,
        ),
        samples,
    );
    // Agents that do not report kernel memory do not report these counters either.
    let counters = report.kernel().map(|_| report.counters());
    let stalls = counters.map(|counters| {
        let user = counters.allocstall.saturating_sub(counters.allocstall_kernel);
        [("kernel", counters.allocstall_kernel), ("user", user)]
    });
    out.counters(
        Family("guest_allocation_stalls", "Allocations that had to reclaim memory first.", None),
        stalls.into_iter().flatten().map(|(memory, count)| (one("memory", memory), count)),
    );
    out.counters(
        Family(
            "guest_numa_miss_pages",
            "Pages allocated on another node than the requested one.",
            None,
        ),
        counters.into_iter().map(|counters| (vec![], counters.numa_miss)),
    );
    out.counters(
        Family("guest_numa_other_pages", "Pages allocated on another node than the task's.", None),
        counters.into_iter().map(|counters| (vec![], counters.numa_other)),
    );
    let in_kernel_zones = report.zones().iter().filter(|zone| zone.serves_kernel());
    let user_pages = in_kernel_zones.filter_map(|zone| zone.user_pages);
    let user_bytes =
        user_pages.reduce(u64::saturating_add).map(|pages| pages.saturating_mul(PAGE_BYTES));
    out.bytes(
        "guest_user_memory_in_kernel_zones",
        "Memory of programs and page cache in zones that the kernel could use itself.",
        user_bytes.into_iter().map(|bytes| (vec![], bytes)),
    );
}

/// Exposes online memory by its use. If the agent gives DRAM blocks to the kernel, they move from
/// `movable` to `kernel`.
fn expose_online_memory(out: &mut Exposition, report: &Report) {
    let by_user = report.blocks().nodes.iter().flat_map(|blocks| {
        let kernel_bytes = blocks.online_bytes.saturating_sub(blocks.movable_online_bytes);
        [("kernel", kernel_bytes), ("movable", blocks.movable_online_bytes)].map(|(user, bytes)| {
            (vec![("node", blocks.node.to_string()), ("user", user.to_owned())], bytes)
        })
    });
    out.bytes(
        "guest_online_memory",
        "Online memory blocks of a node: those that the guest's kernel can use, and movable ones.",
        by_user,
    );
}

fn expose_guest(out: &mut Exposition, report: &Report) {
    let (memory, stall, counters) = (report.memory(), report.stall(), report.counters());
    out.seconds_total(
        "pressure_stall",
        "Time in which some or all of the guest's tasks waited for memory.",
        [
            (one("kind", "some"), stall.some_us as f64 / 1e6),
            (one("kind", "full"), stall.full_us as f64 / 1e6),
        ],
    );
    out.bytes(
        "guest_memory",
        "Memory of the guest, as its kernel counts it.",
        [
            (one("state", "total"), memory.total_bytes),
            (one("state", "free"), memory.free_bytes),
            (one("state", "available"), memory.available_bytes),
            (one("state", "anonymous"), memory.anon_bytes),
            (one("state", "cached"), memory.cached_bytes),
        ],
    );
    expose_kernel(out, report);
    out.bytes(
        "guest_swap",
        "Swap space of the guest.",
        [
            (one("state", "total"), memory.swap_total_bytes),
            (one("state", "free"), memory.swap_free_bytes),
        ],
    );
    expose_online_memory(out, report);
    let onlining = report.blocks().online_policy;
    let policies = OnlinePolicy::ALL
        .into_iter()
        .map(|policy| (one("policy", policy.label()), policy == onlining));
    out.flags(
        Family(
            "guest_online_policy",
            "1 for the guest's policy for onlining plugged memory, 0 for all others.",
            None,
        ),
        policies,
    );
    out.counters(
        Family("guest_swapped_pages", "Pages that the guest has swapped in and out.", None),
        [(one("direction", "in"), counters.pswpin), (one("direction", "out"), counters.pswpout)],
    );
    out.counters(
        Family("guest_oom_kills", "Processes killed by the guest's OOM killer.", None),
        [(vec![], counters.oom_kill)],
    );
}
