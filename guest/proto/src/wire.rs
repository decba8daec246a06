//! Messages in transmitted form. Their values have not been verified.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{PROTOCOL_VERSION, Refusal};

/// Message from the agent. Its shape has been checked, but its values have not. `AgentMessage` is
/// the verified form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one at a time, and nearly every one is a report"
)]
pub enum RawAgentMessage {
    /// First message of a connection.
    Hello(RawHello),
    /// State of the guest's memory.
    Report(RawReport),
}

/// Identity of the sender and of its kernel. Unverified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawHello {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// Version of the agent.
    pub agent_version: String,
    /// Release of the running kernel, as `uname -r` prints it.
    pub kernel_release: String,
    /// Build of the kernel, as `uname -v` prints it. The build is needed because distributions keep
    /// a release's name when they fix a kernel. Empty from older agents.
    #[serde(default)]
    pub kernel_version: String,
    /// Preemption model of the kernel: `none`, `voluntary`, `full`, `lazy` or `rt`. If the kernel
    /// reports no more detail, `dynamic` or `static`.
    pub preemption: String,
    /// Page size of the guest.
    pub page_size_bytes: u64,
}

/// Reason for sending a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The interval at rest has elapsed.
    #[default]
    Rest,
    /// Memory is below the watermark or falling fast.
    Watermark,
    /// A pressure trigger in the kernel fired.
    Stall,
    /// Reason that this version does not know.
    #[serde(other)]
    Other,
}

/// State of the guest's memory at one point in time. Unverified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RawReport {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// Number that increases by one with every report on a connection.
    pub seq: u64,
    /// Value of the guest's CLOCK_MONOTONIC.
    pub monotonic_ms: u64,
    /// Reason for sending the report.
    #[serde(default)]
    pub cause: Cause,
    /// Values from /proc/meminfo.
    pub memory: Memory,
    /// Values from /proc/meminfo and /proc/sys/fs. `None` if unknown, for example from older
    /// agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelUse>,
    /// Values from /proc/pressure/memory.
    #[serde(default)]
    pub stall: Stall,
    /// Values from /proc/zoneinfo for all zones with memory.
    pub zones: Vec<Zone>,
    /// Values from /proc/vmstat.
    #[serde(default)]
    pub counters: Counters,
    /// Values from /sys/devices/system/memory. They are read rarely, so they may be seconds older
    /// than the rest of the report.
    #[serde(default)]
    pub blocks: Blocks,
    /// Idle memory per node, in ascending order of nodes. Nodes that are not monitored are missing,
    /// and older agents monitor none. The values are usually half a minute older than the rest of
    /// the report, and at most three minutes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub idle: Vec<NodeIdle>,
}

/// Memory of one node that has not been accessed for a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeIdle {
    /// NUMA node.
    pub node: u32,
    /// Idle memory, including free memory. It is an estimate from samples.
    pub idle_bytes: u64,
    /// Minimum time for which the memory has not been accessed.
    pub span_ms: u64,
}

/// Sizes from /proc/meminfo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// MemTotal: memory that the page allocator manages.
    pub total_bytes: u64,
    /// MemFree.
    pub free_bytes: u64,
    /// MemAvailable: the kernel's estimate of how much memory can be allocated without swapping.
    pub available_bytes: u64,
    /// Sum of Cached and Buffers.
    #[serde(default)]
    pub cached_bytes: u64,
    /// AnonPages.
    #[serde(default)]
    pub anon_bytes: u64,
    /// SwapTotal.
    #[serde(default)]
    pub swap_total_bytes: u64,
    /// SwapFree.
    #[serde(default)]
    pub swap_free_bytes: u64,
}

/// Memory that the kernel uses itself. Sizes are from /proc/meminfo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelUse {
    /// SUnreclaim: slabs that are never reclaimed.
    pub slab_unreclaimable_bytes: u64,
    /// SReclaimable. MemAvailable includes most of it. It also contains slabs that Linux cannot
    /// reclaim: dentries of a tmpfs, and inodes with page cache.
    pub slab_reclaimable_bytes: u64,
    /// PageTables.
    pub page_table_bytes: u64,
    /// KernelStack.
    pub stack_bytes: u64,
    /// Dentries on the LRU lists of their file systems, from /proc/sys/fs/dentry-state. `None` if
    /// unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_dentries: Option<u64>,
    /// Inodes on the LRU lists of their file systems, from /proc/sys/fs/inode-nr. `None` if
    /// unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_inodes: Option<u64>,
}

impl KernelUse {
    /// Sum of all parts. In a verified report it cannot overflow, because no part exceeds the
    /// memory of a machine.
    pub fn total_bytes(&self) -> u64 {
        let parts = [self.slab_reclaimable_bytes, self.page_table_bytes, self.stack_bytes];
        parts.iter().fold(self.slab_unreclaimable_bytes, |sum, part| sum.saturating_add(*part))
    }
}

/// Time that tasks spent waiting for memory, from /proc/pressure/memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stall {
    /// Total time in which at least one task waited.
    pub some_us: u64,
    /// Total time in which all tasks waited.
    pub full_us: u64,
    /// `some` over the last 10 s, in hundredths of a percent.
    pub some_avg10_basis_points: u32,
    /// `full` over the last 10 s, in hundredths of a percent.
    pub full_avg10_basis_points: u32,
}

/// Kind of a zone of the guest's page allocator.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum ZoneKind {
    /// ZONE_DMA: below 16 MiB.
    Dma,
    /// ZONE_DMA32: below 4 GiB.
    Dma32,
    /// ZONE_NORMAL.
    Normal,
    /// ZONE_MOVABLE: contains only pages that can be moved, so its memory can be unplugged.
    Movable,
    /// ZONE_DEVICE.
    Device,
    /// Zone that this version does not know.
    #[default]
    #[serde(other)]
    Other,
}

/// Free pages and watermarks of a zone, from /proc/zoneinfo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zone {
    /// NUMA node of the zone.
    pub node: u32,
    /// Kind of the zone.
    pub kind: ZoneKind,
    /// Free pages.
    pub free_pages: u64,
    /// Watermark below which only allocations that may use the kernel's reserves succeed.
    pub min_pages: u64,
    /// Watermark below which kswapd is woken.
    pub low_pages: u64,
    /// Watermark at which kswapd stops.
    pub high_pages: u64,
    /// Pages managed by the page allocator.
    pub managed_pages: u64,
    /// Free blocks of [`LARGEST_BLOCK_BYTES`](crate::LARGEST_BLOCK_BYTES), from /proc/buddyinfo.
    /// They can be unplugged without migrating pages. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_free_blocks: Option<u64>,
    /// Pages of programs and page cache. In a zone that serves the kernel, these pages could be
    /// moved to another zone. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_pages: Option<u64>,
    /// Free pages that user pages leave to the kernel (`protection`), in addition to the
    /// watermarks. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protected_pages: Option<u64>,
}

/// Event counters from /proc/vmstat. They are totals since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Pages swapped in.
    pub pswpin: u64,
    /// Pages swapped out.
    pub pswpout: u64,
    /// Page faults that waited for I/O.
    pub pgmajfault: u64,
    /// Anonymous pages that were refaulted.
    pub workingset_refault_anon: u64,
    /// File pages that were refaulted.
    pub workingset_refault_file: u64,
    /// Pages that kswapd scanned.
    pub pgscan_kswapd: u64,
    /// Pages that allocating tasks scanned themselves.
    pub pgscan_direct: u64,
    /// Pages that kswapd reclaimed.
    pub pgsteal_kswapd: u64,
    /// Pages that allocating tasks reclaimed themselves.
    pub pgsteal_direct: u64,
    /// Number of allocations that entered direct reclaim, in all zones.
    pub allocstall: u64,
    /// Part of `allocstall` that was for kernel memory, such as page tables, slabs and sockets.
    pub allocstall_kernel: u64,
    /// Pages allocated on a node other than the requested one.
    pub numa_miss: u64,
    /// Pages allocated on a node other than the task's.
    pub numa_other: u64,
    /// Processes killed by the OOM killer.
    pub oom_kill: u64,
}

/// States of the guest's memory blocks, from /sys/devices/system/memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// Kernel policy for plugged memory.
    #[serde(default)]
    pub online_policy: OnlinePolicy,
    /// Size of a memory block. Zero if the kernel does not support memory hotplug.
    #[serde(default)]
    pub block_bytes: u64,
    /// One entry for each node that has blocks.
    #[serde(default)]
    pub nodes: Vec<NodeBlocks>,
}

/// Memory blocks of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeBlocks {
    /// NUMA node.
    pub node: u32,
    /// Size of online blocks, in any zone.
    pub online_bytes: u64,
    /// Size of plugged blocks that are not online.
    pub offline_bytes: u64,
    /// Part of `online_bytes` in ZONE_MOVABLE.
    pub movable_online_bytes: u64,
}

/// Onlining policy from /sys/devices/system/memory/auto_online_blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnlinePolicy {
    /// Plugged memory is offline until a program brings it online.
    Offline,
    /// The kernel chooses the zone. A node's first memory becomes ZONE_NORMAL.
    Online,
    /// Plugged memory goes to ZONE_NORMAL, from which it may be impossible to unplug.
    OnlineKernel,
    /// Plugged memory goes to ZONE_MOVABLE, from which it can be unplugged. Under any other known
    /// policy, the governor limits how much memory it plugs.
    OnlineMovable,
    /// Unknown policy.
    #[default]
    #[serde(other)]
    Unknown,
}

impl OnlinePolicy {
    /// All policies.
    pub const ALL: [OnlinePolicy; 5] = [
        OnlinePolicy::Offline,
        OnlinePolicy::Online,
        OnlinePolicy::OnlineKernel,
        OnlinePolicy::OnlineMovable,
        OnlinePolicy::Unknown,
    ];

    /// Name of the policy in reports and metrics.
    pub fn label(self) -> &'static str {
        match self {
            OnlinePolicy::Offline => "offline",
            OnlinePolicy::Online => "online",
            OnlinePolicy::OnlineKernel => "online_kernel",
            OnlinePolicy::OnlineMovable => "online_movable",
            OnlinePolicy::Unknown => "unknown",
        }
    }
}

/// Message from the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum VmmMessage {
    /// Settings for all further reports.
    Settings(Settings),
    /// Brings all offline blocks online as movable memory, and makes the kernel do the same with
    /// future blocks.
    OnlineBlocks {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
    },
}

/// Kind of memory that is compared with the watermark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Free memory. Page cache counts as used memory.
    Free,
    /// Memory that can be allocated without swapping. Unknown values from later versions also map
    /// to this one.
    #[default]
    #[serde(other)]
    Available,
}

impl Measure {
    /// Returns the amount of this kind in `memory`.
    pub fn of(self, memory: &Memory) -> u64 {
        match self {
            Measure::Free => memory.free_bytes,
            Measure::Available => memory.available_bytes,
        }
    }
}

/// Settings of the agent's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// [`PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// Amount of memory below which the agent reports at the fast rate.
    pub watermark_bytes: u64,
    /// Kind of memory to compare with the watermark. Older VMMs and agents omit the field and mean
    /// available memory.
    #[serde(default)]
    pub watermark_of: Measure,
    /// Report interval above the watermark.
    pub rest_interval_ms: u32,
    /// Report interval below the watermark.
    pub watermark_interval_ms: u32,
    /// Memory that virtio-mem can add to boot memory. Older VMMs omit it.
    #[serde(default)]
    pub hotplug_bytes: u64,
}

impl Settings {
    /// Shortest interval that an agent accepts, because each report has a cost for the guest.
    pub const MIN_INTERVAL_MS: u32 = 20;
    /// Longest interval that an agent accepts.
    pub const MAX_INTERVAL_MS: u32 = 60_000;

    /// Settings for 1 report per second at rest, and 20 per second while less than
    /// `watermark_bytes` is available.
    pub fn with_watermark(watermark_bytes: u64) -> Self {
        Settings {
            version: PROTOCOL_VERSION,
            watermark_bytes,
            watermark_of: Measure::Available,
            rest_interval_ms: 1000,
            watermark_interval_ms: 50,
            hotplug_bytes: 0,
        }
    }

    /// Returns true if `memory` is below the watermark.
    pub fn is_under(&self, memory: &Memory) -> bool {
        self.watermark_of.of(memory) < self.watermark_bytes
    }

    /// Limits both intervals to the range that an agent accepts. The VMM can therefore request
    /// neither a busy loop nor silence.
    pub fn clamped(self) -> Self {
        let clamp = |ms: u32| ms.clamp(Self::MIN_INTERVAL_MS, Self::MAX_INTERVAL_MS);
        Settings {
            rest_interval_ms: clamp(self.rest_interval_ms),
            watermark_interval_ms: clamp(self.watermark_interval_ms),
            ..self
        }
    }
}

/// Fields that must be known before the rest of an object can be decoded.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(default, borrow, rename = "type")]
    kind: Option<Kind<'a>>,
    version: Option<u64>,
}

/// Message type, borrowed from the input if possible. By default, serde copies each string.
#[derive(Deserialize)]
#[serde(transparent)]
struct Kind<'a>(#[serde(borrow)] Cow<'a, str>);

/// Checks that `line` is an object of this version and that its type is one of `kinds`. Returns its
/// type, and the line as text.
pub(crate) fn open_envelope<'a>(
    line: &'a [u8],
    kinds: &[&'static str],
) -> Result<(&'static str, &'a str), Refusal> {
    if line.len() > crate::MAX_LINE_BYTES {
        return Err(Refusal::TooLong { bound_bytes: crate::MAX_LINE_BYTES });
    }
    let text = std::str::from_utf8(line).map_err(|_| Refusal::NotUtf8)?;
    let envelope: Envelope = serde_json::from_str(text).map_err(Refusal::from_json)?;
    let Some(version) = envelope.version else {
        return Err(Refusal::WrongShape { reason: "no version".into() });
    };
    if version != u64::from(PROTOCOL_VERSION) {
        return Err(Refusal::WrongVersion { theirs: version, ours: PROTOCOL_VERSION });
    }
    let Some(Kind(kind)) = envelope.kind else {
        return Err(Refusal::WrongShape { reason: "no type".into() });
    };
    let known = kinds.iter().find(|known| **known == kind);
    known.map(|known| (*known, text)).ok_or_else(|| Refusal::unknown_type(&kind))
}

/// Decodes a line from the agent. Checks its shape and version, but not its values.
pub fn decode_agent_message(line: &[u8]) -> Result<RawAgentMessage, Refusal> {
    // The enum is not decoded directly, because serde would buffer the whole object to find its
    // tag. The buffering would take twice the time of all other decoding.
    let message = match open_envelope(line, &["hello", "report"])? {
        ("hello", text) => serde_json::from_str(text).map(RawAgentMessage::Hello),
        (_, text) => serde_json::from_str(text).map(RawAgentMessage::Report),
    };
    message.map_err(Refusal::from_json)
}

/// Decodes a line from the VMM.
pub fn decode_vmm_message(line: &[u8]) -> Result<VmmMessage, Refusal> {
    let (_, text) = open_envelope(line, &["settings", "online_blocks"])?;
    serde_json::from_str(text).map_err(Refusal::from_json)
}

/// Replaces the content of `out` with `message` and a newline. Allocates only if the buffer must
/// grow.
pub fn encode_line(message: &impl Serialize, out: &mut Vec<u8>) {
    out.clear();
    serde_json::to_writer(&mut *out, message).expect("serializing plain data to a Vec cannot fail");
    out.push(b'\n');
}

/// Same as [`encode_line`], for a report that the caller keeps and reuses.
pub fn encode_report(report: &RawReport, out: &mut Vec<u8>) {
    /// Borrowed form of [`RawAgentMessage`].
    #[derive(Serialize)]
    #[serde(tag = "type", rename_all = "snake_case")]
    enum Borrowed<'a> {
        Report(&'a RawReport),
    }
    encode_line(&Borrowed::Report(report), out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_messages_can_be_decoded() {
        let report = RawReport {
            version: PROTOCOL_VERSION,
            seq: 7,
            monotonic_ms: 1234,
            cause: Cause::Stall,
            zones: vec![Zone {
                node: 1,
                kind: ZoneKind::Movable,
                free_pages: 9,
                largest_free_blocks: Some(2),
                ..Zone::default()
            }],
            idle: vec![NodeIdle { node: 1, idle_bytes: 4096, span_ms: 60_000 }],
            ..RawReport::default()
        };
        let message = RawAgentMessage::Report(report);
        let mut line = Vec::new();
        encode_line(&message, &mut line);
        assert_eq!(line.last(), Some(&b'\n'));
        assert_eq!(decode_agent_message(&line[..line.len() - 1]), Ok(message.clone()));
        let RawAgentMessage::Report(report) = &message else { unreachable!("made above") };
        let mut borrowed = Vec::new();
        encode_report(report, &mut borrowed);
        assert_eq!(borrowed, line);

        let settings = VmmMessage::Settings(Settings::with_watermark(1 << 27));
        encode_line(&settings, &mut line);
        assert_eq!(decode_vmm_message(&line), Ok(settings), "a trailing newline is white space");
        encode_line(&VmmMessage::OnlineBlocks { version: 1 }, &mut line);
        assert_eq!(decode_vmm_message(&line), Ok(VmmMessage::OnlineBlocks { version: 1 }));
    }

    #[test]
    fn message_decodes_like_its_enum() {
        let report = r#""memory":{"total_bytes":1,"free_bytes":2,"available_bytes":3},"zones":[]"#;
        let hello = r#""agent_version":"1","kernel_release":"6","preemption":"none","page_size_bytes":4096"#;
        for (fields, kind) in [(report, "report"), (hello, "hello")] {
            let envelope = format!(r#""type":"{kind}","version":1"#);
            let head = format!(r#"{envelope},"seq":1,"monotonic_ms":2"#);
            for (line, is_read) in [
                (format!("{{{head},{fields}}}"), true),
                (format!(r#"{{{fields},"seq":1,"monotonic_ms":2,{envelope}}}"#), true),
                (
                    format!(r#"{{"version":1,"type":"{kind}",{fields},"seq":1,"monotonic_ms":2}}"#),
                    true,
                ),
                (format!("{{{head},{fields}}} {{}}"), false),
                (format!("{{{head},{fields},{fields}}}"), false),
                (format!("{{{envelope}}}"), false),
            ] {
                let by_enum = serde_json::from_str::<RawAgentMessage>(&line);
                let message = decode_agent_message(line.as_bytes());
                assert_eq!(message.is_ok(), is_read, "{line}");
                assert_eq!(message.ok(), by_enum.ok(), "{line}");
            }
        }
    }

    #[test]
    fn fields_of_a_later_version_are_skipped() {
        let line = r#"{"type":"report","version":1,"seq":1,"monotonic_ms":5,"cause":"full_moon","tide":{"high":[1,2]},
            "memory":{"total_bytes":4096,"free_bytes":0,"available_bytes":0,"lent_bytes":1},
            "zones":[{"node":0,"kind":"cxl","free_pages":1,"min_pages":0,"low_pages":0,"high_pages":0,"managed_pages":1}]}"#;
        let Ok(RawAgentMessage::Report(report)) = decode_agent_message(line.as_bytes()) else {
            panic!("refused: {:?}", decode_agent_message(line.as_bytes()));
        };
        assert_eq!(report.cause, Cause::Other);
        assert_eq!(report.zones[0].kind, ZoneKind::Other);
        assert_eq!(report.blocks.online_policy, OnlinePolicy::Unknown);
        assert_eq!(
            (report.zones[0].largest_free_blocks, report.idle.len()),
            (None, 0),
            "nor missed"
        );
    }

    #[test]
    fn an_online_policy_has_one_name_everywhere() {
        for policy in OnlinePolicy::ALL {
            assert_eq!(serde_json::to_value(policy).unwrap(), policy.label());
        }
    }

    #[test]
    fn unknown_values_are_omitted() {
        let mut line = Vec::new();
        let unknown = RawReport { zones: vec![Zone::default()], ..RawReport::default() };
        encode_report(&unknown, &mut line);
        let line = String::from_utf8(line).expect("JSON is UTF-8");
        assert!(!line.contains("largest_free_blocks") && !line.contains("idle"), "{line}");
    }

    #[test]
    fn invalid_message_is_refused_with_a_reason() {
        for (line, label) in [
            (&b"\xff\xfe{}"[..], "not_utf8"),
            (b"", "not_json"),
            (b"GET / HTTP/1.1", "not_json"),
            (br#"{"type":"report","version":1"#, "not_json"),
            (&[b'['; 10_000], "wrong_shape"),
            (b"[]", "wrong_shape"),
            (br#"{"type":"report"}"#, "wrong_shape"),
            (br#"{"version":1}"#, "wrong_shape"),
            (br#"{"type":"report","version":1,"seq":-1}"#, "wrong_shape"),
            (br#"{"type":"poem","version":1}"#, "unknown_type"),
            (&[b' '; crate::MAX_LINE_BYTES + 1], "too_long"),
        ] {
            let refusal = decode_agent_message(line).expect_err(label);
            assert_eq!(refusal.label(), label, "{:?}", line.escape_ascii().to_string());
        }
    }

    #[test]
    fn other_version_is_refused_before_the_message_is_parsed() {
        assert_eq!(
            decode_agent_message(br#"{"type":"ode","version":2,"seq":"first"}"#),
            Err(Refusal::WrongVersion { theirs: 2, ours: PROTOCOL_VERSION })
        );
    }

    #[test]
    fn watermark_is_of_available_memory_unless_both_sides_support_another() {
        let settings = |watermark_of: &str| {
            let line = format!(
                r#"{{"type":"settings","version":1,"watermark_bytes":5,{watermark_of}"rest_interval_ms":1000,
                    "watermark_interval_ms":50}}"#
            );
            match decode_vmm_message(line.as_bytes()) {
                Ok(VmmMessage::Settings(settings)) => settings,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(settings(""), Settings::with_watermark(5), "a VMM that does not send the field");
        assert_eq!(
            settings(r#""watermark_of":"swapped","#),
            Settings::with_watermark(5),
            "a newer VMM"
        );
        let of_free = Settings { watermark_of: Measure::Free, ..Settings::with_watermark(5) };
        assert_eq!(settings(r#""watermark_of":"free","#), of_free);
        for (free_bytes, available_bytes, under_free, under_available) in
            [(4, 4, true, true), (4, 5, true, false), (5, 4, false, true), (5, 5, false, false)]
        {
            let memory = Memory { free_bytes, available_bytes, ..Memory::default() };
            let under =
                [of_free, Settings::with_watermark(5)].map(|settings| settings.is_under(&memory));
            assert_eq!(
                under,
                [under_free, under_available],
                "{free_bytes} free, {available_bytes} available"
            );
        }
    }

    #[test]
    fn settings_cannot_request_a_busy_loop_or_silence() {
        let wild = Settings {
            rest_interval_ms: u32::MAX,
            watermark_interval_ms: 0,
            ..Settings::with_watermark(1)
        };
        let tame = wild.clamped();
        assert_eq!(tame.rest_interval_ms, Settings::MAX_INTERVAL_MS);
        assert_eq!(tame.watermark_interval_ms, Settings::MIN_INTERVAL_MS);
    }
}
