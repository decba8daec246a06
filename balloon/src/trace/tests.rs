//! Checks that traces are read as they were written, and that errors name the damaged line.

use std::io::Cursor;

use foreshore_proto::{
    Counters, KernelUse, Measure, Memory, PROTOCOL_VERSION, RawReport, Zone, ZoneKind,
};
use proptest::prelude::*;

use super::*;
use crate::plan::{Plan, Reason, ZoneTarget};
use crate::{Distances, HostView, MIB, Tier};

const GOLDEN: &str = include_str!("../../tests/golden/trace-v1.jsonl");

fn zone(id: u32, tier: Tier, max_mib: u64) -> ZoneSizes {
    ZoneSizes::empty(id, tier, max_mib * MIB)
}

fn host() -> HostView {
    let mut host = HostView::default();
    host.zones.extend([zone(0, Tier::Dram, 128), zone(1, Tier::Pm, 1024)]);
    host.boot_bytes = 384 * MIB;
    host.pool_free_bytes = 4096 * MIB;
    host
}

fn header() -> Header {
    let host = host();
    Header {
        vm: "golden".to_owned(),
        boot_bytes: host.boot_bytes,
        zones: host.zones,
        balloon: None,
        distances: Distances::default(),
    }
}

fn report() -> Report {
    let raw = RawReport {
        version: PROTOCOL_VERSION,
        seq: 1,
        monotonic_ms: 3500,
        memory: Memory {
            total_bytes: 352 * MIB,
            free_bytes: 20 * MIB,
            available_bytes: 30 * MIB,
            ..Memory::default()
        },
        zones: vec![Zone {
            kind: ZoneKind::Dma32,
            free_pages: 5120,
            min_pages: 500,
            low_pages: 625,
            high_pages: 750,
            managed_pages: 90_112,
            ..Zone::default()
        }],
        ..RawReport::default()
    };
    Report::try_from(raw).expect("sound")
}

fn plan(requested_mib: [u64; 2]) -> Plan {
    let target =
        |(id, mib): (u32, u64)| ZoneTarget { zone: ZoneId(id), requested_bytes: mib * MIB };
    Plan {
        direction: Direction::Grow,
        reason: Reason::LowAvailable,
        limited_by: Some(Reason::PoolEmpty),
        wanted_bytes: 200 * MIB,
        targets: (0..).zip(requested_mib).map(target).collect(),
        dry_run: false,
        watermark_bytes: 48 * MIB,
        watermark_of: Measure::Available,
    }
}

/// Content of the golden trace: one entry of each kind, and one plan that changes nothing.
fn written() -> Vec<u8> {
    let mut host = host();
    let mut writer = Writer::new(Vec::new(), &header()).expect("a Vec accepts all bytes");
    assert!(writer.host(TimeMs(1000), &host).unwrap(), "the pool is news");
    writer.report(TimeMs(1500), &report()).unwrap();
    writer.plan(TimeMs(1500), &plan([128, 40]), &host).unwrap();
    (host.zones[0].requested_bytes, host.zones[1].requested_bytes) = (128 * MIB, 40 * MIB);
    assert!(writer.host(TimeMs(1501), &host).unwrap());
    assert!(!writer.host(TimeMs(1502), &host).unwrap(), "nothing has changed");
    host.zones[0].plugged_bytes = 64 * MIB;
    assert!(writer.host(TimeMs(1600), &host).unwrap());
    writer.plan(TimeMs(2000), &plan([128, 40]), &host).unwrap();
    writer.into_inner()
}

fn expected_entries() -> Vec<Entry> {
    let zones = |requested: [u64; 2], plugged: [u64; 2]| {
        (0..2)
            .map(|i| HostZone {
                id: ZoneId(i as u32),
                requested_bytes: requested[i] * MIB,
                plugged_bytes: plugged[i] * MIB,
            })
            .collect()
    };
    let pool_free_bytes = 4096 * MIB;
    let host = |at, requested, plugged| Entry::Host {
        at: TimeMs(at),
        zones: zones(requested, plugged),
        pool_free_bytes,
        storage: None,
    };
    let plan = |at, targets| Entry::Plan {
        at: TimeMs(at),
        plan: RecordedPlan {
            direction: Direction::Grow,
            reason: "low_available".to_owned(),
            limited_by: Some("pool_empty".to_owned()),
            wanted_bytes: 200 * MIB,
            targets,
            dry_run: false,
        },
    };
    vec![
        host(1000, [0, 0], [0, 0]),
        Entry::Report { at: TimeMs(1500), report: Box::new(report()) },
        plan(1500, vec![(ZoneId(0), 128 * MIB), (ZoneId(1), 40 * MIB)]),
        host(1501, [128, 40], [0, 0]),
        host(1600, [128, 40], [64, 0]),
        plan(2000, vec![]),
    ]
}

fn read(text: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
    Trace::read(Cursor::new(text.as_ref()))
}

#[test]
fn written_trace_is_read_unchanged() {
    let trace = read(written()).expect("sound");
    assert_eq!(trace, Trace { header: header(), entries: expected_entries(), cut_off: false });
}

/// Report in the second golden trace, which contains fields of newer agents.
fn report_of_kernel() -> Report {
    let mut raw = RawReport::from(report());
    raw.kernel = Some(KernelUse {
        slab_unreclaimable_bytes: 8 * MIB,
        slab_reclaimable_bytes: 100 * MIB,
        page_table_bytes: 4 * MIB,
        stack_bytes: 2 * MIB,
        unused_dentries: Some(139_103),
        unused_inodes: Some(507),
    });
    raw.zones[0].user_pages = Some(40_000);
    raw.counters = Counters {
        allocstall: 9,
        allocstall_kernel: 7,
        numa_miss: 3,
        numa_other: 4,
        ..Counters::default()
    };
    Report::try_from(raw).expect("sound")
}

#[test]
fn reports_of_newer_agents_are_written_and_read() {
    let mut writer = Writer::new(Vec::new(), &header()).expect("a Vec accepts all bytes");
    writer.report(TimeMs(1500), &report_of_kernel()).expect("a Vec accepts all bytes");
    let text = String::from_utf8(writer.into_inner()).expect("text");
    assert_eq!(text, include_str!("../../tests/golden/trace-v1-kernel.jsonl"));
    let entries = vec![Entry::Report { at: TimeMs(1500), report: Box::new(report_of_kernel()) }];
    assert_eq!(read(text).expect("sound").entries, entries);
}

#[test]
fn version_1_of_the_format_can_be_read() {
    let trace = read(GOLDEN).expect("golden");
    assert_eq!(trace, Trace { header: header(), entries: expected_entries(), cut_off: false });
}

#[test]
fn writer_writes_version_1() {
    // A report of a later agent may contain additional fields.
    let written = String::from_utf8(written()).expect("JSON");
    for (ours, golden) in written.lines().zip(GOLDEN.lines()) {
        if !golden.starts_with(r#"{"type":"report""#) {
            assert_eq!(ours, golden);
        }
    }
    assert_eq!(written.lines().count(), GOLDEN.lines().count());
}

#[test]
fn fields_of_later_writers_are_skipped() {
    let text = GOLDEN.replace(r#""at_ms":"#, r#""tide":[{"high":1}],"at_ms":"#);
    assert_eq!(read(text).expect("sound").entries, expected_entries());
}

/// Returns the golden trace after replacing `old` by `new` in line `line`.
fn damaged(line: usize, old: &str, new: &str) -> String {
    let lines = GOLDEN.lines().enumerate().map(|(index, text)| match index + 1 {
        at if at == line => {
            assert!(text.contains(old), "line {line} has no {old}");
            text.replacen(old, new, 1) + "\n"
        }
        _ => format!("{text}\n"),
    });
    lines.collect()
}

#[test]
fn damaged_line_is_refused_with_number_value_and_bound() {
    let cases = [
        (1, r#""version":1"#, r#""version":2"#, "the version is 2, must be 1"),
        (
            1,
            r#""vm":"golden""#,
            r#""vm":"gol\nden""#,
            r#"vm is "gol\nden", must be up to 128 bytes of printable ASCII"#,
        ),
        (
            1,
            r#""boot_bytes":402653184"#,
            r#""boot_bytes":70368744177665"#,
            "boot_bytes is 70368744177665, must be 0 to 70368744177664",
        ),
        (1, r#""id":1"#, r#""id":0"#, "zone 0 occurs twice"),
        (1, r#""block_bytes":2097152"#, r#""block_bytes":0"#, "block_bytes is 0, must be 4096 to"),
        (
            1,
            r#""guest_numa_node":0"#,
            r#""guest_numa_node":1024"#,
            "guest_numa_node is 1024, must be 0 to 1023",
        ),
        (
            1,
            r#""floor_bytes":0"#,
            r#""floor_bytes":134217729"#,
            "floor_bytes is 134217729, must be 0 to 134217728",
        ),
        (1, r#""tier":"pm""#, r#""tier":"tape""#, "unknown variant `tape`"),
        (1, r#""type":"trace""#, r#""type":"plan""#, "missing field"),
        (2, r#""at_ms":1000"#, r#""at_ms":-1"#, "invalid value"),
        (2, r#""pool_free_bytes":4294967296"#, r#""pool_free_bytes":"much""#, "invalid type"),
        (2, r#"{"id":0"#, r#"{"id":5"#, "the zones are [5, 1], but the header has [0, 1]"),
        (2, r#""type":"host""#, r#""type":"guest""#, "unknown variant `guest`"),
        (3, r#""at_ms":1500"#, r#""at_ms":999"#, "at_ms is 999, but an earlier line has 1000"),
        (
            3,
            r#""at_ms":1500"#,
            r#""at_ms":9999999999999"#,
            "at_ms is 9999999999999, must be 0 to 3162240000000",
        ),
        (3, r#""version":1"#, r#""version":9"#, "report: message has protocol version 9"),
        (
            3,
            r#""free_bytes":20971520"#,
            r#""free_bytes":369098753"#,
            "report: free_bytes is 369098753, must be at most total_bytes",
        ),
        (4, r#""direction":"grow""#, r#""direction":"up""#, "unknown variant `up`"),
        (
            4,
            r#""reason":"low_available""#,
            r#""reason":"<b>""#,
            r#"reason is "<b>", must be up to 64 bytes of a-z, 0-9 and _"#,
        ),
        (
            4,
            r#"{"id":0,"requested_bytes":134217728"#,
            r#"{"id":0,"requested_bytes":134217730"#,
            "requested_bytes is 134217730, must be 0 to 134217728",
        ),
        (
            5,
            r#""requested_bytes":41943040"#,
            r#""requested_bytes":41943041"#,
            "requested_bytes modulo block_bytes is 1, must be 0 to 0",
        ),
        (
            6,
            r#""plugged_bytes":67108864"#,
            r#""plugged_bytes":2147483648"#,
            "plugged_bytes is 2147483648, must be 0 to 134217728",
        ),
        (7, "{", "", "expected internally tagged enum"),
    ];
    for (line, old, new, expected) in cases {
        let error = read(damaged(line, old, new)).expect_err(expected).to_string();
        assert!(error.starts_with(&format!("line {line} of the trace: ")), "{error}");
        assert!(error.contains(expected), "{error}\nlacks {expected}");
        assert!(!error.contains('\n') && !error.contains("(byte 0)"), "{error}");
    }
}

#[test]
fn space_for_volumes_is_recorded_when_it_changes() {
    let storage = StorageSpace {
        free_bytes: 300 * MIB,
        needed_bytes: 500 * MIB,
        lent_bytes: 200 * MIB,
        borrowable_bytes: 100 * MIB,
        min_bytes: 32 * MIB,
        low_bytes: 64 * MIB,
        high_bytes: 128 * MIB,
    };
    let mut view = HostView { storage: Some(storage), ..host() };
    let mut writer = Writer::new(Vec::new(), &header()).expect("memory");
    let at = TimeMs(1);
    assert!(writer.host(at, &view).expect("memory") && !writer.host(at, &view).expect("memory"));
    view.storage = Some(StorageSpace { free_bytes: 299 * MIB, ..storage });
    assert!(writer.host(at, &view).expect("memory"));
    let text = String::from_utf8(writer.into_inner()).expect("JSON");
    let trace = read(text.clone()).expect("sound");
    let recorded = trace.entries.iter().map(|entry| match entry {
        Entry::Host { storage, .. } => *storage,
        _ => None,
    });
    assert_eq!(recorded.collect::<Vec<_>>(), [Some(storage), view.storage]);
    let damaged = text.replace(r#""low_bytes":67108864"#, r#""low_bytes":67"#);
    let error = read(damaged).expect_err("marks in the wrong order").to_string();
    let expected = "line 2 of the trace: low_bytes is 67, must be 33554432 to 134217728";
    assert_eq!(error, expected);
}

#[test]
fn balloon_and_distances_are_in_the_header() {
    let mut distances = Distances::default();
    distances.set(0, 1, 17);
    distances.set(1, 0, 28);
    // If a balloon may take all boot memory, none is left.
    let header = Header { boot_bytes: 0, balloon: Some(ZoneId(0)), distances, ..header() };
    let text = Writer::new(Vec::new(), &header).expect("a Vec accepts all bytes").into_inner();
    let trace = Trace::read(&text[..]).expect("written traces are readable");
    assert_eq!(trace.header, header);
    let text = String::from_utf8(text).expect("JSON");
    for (from, to, message) in [
        (r#""balloon":0"#, r#""balloon":7"#, "the balloon is zone 7, which does not exist"),
        (r#""distance":17"#, r#""distance":9"#, "distance is 9, must be 10 to 255"),
        (r#"{"from":0"#, r#"{"from":1024"#, "from is 1024, must be 0 to 1023"),
    ] {
        let error = read(text.replace(from, to)).expect_err(to).to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn balloon_counts_in_pages_and_other_zones_count_in_blocks() {
    let mut host = host();
    host.zones[0].plugged_bytes = 64 * MIB + 4096;
    let header = |balloon| Header { zones: host.zones.clone(), balloon, ..header() };
    let mut writer =
        Writer::new(Vec::new(), &header(Some(ZoneId(0)))).expect("a Vec accepts all bytes");
    // Linux inflates and deflates a balloon by up to 256 pages at a time.
    host.zones[0].plugged_bytes -= 255 * 4096;
    assert!(writer.host(TimeMs(1000), &host).unwrap());
    let text = writer.into_inner();
    let trace = read(&text).expect("written traces are readable");
    let [Entry::Host { zones, .. }] = &trace.entries[..] else { panic!("{:?}", trace.entries) };
    assert_eq!(zones[0].plugged_bytes, 64 * MIB - 254 * 4096);
    let text = String::from_utf8(text).expect("JSON");
    for (from, to, message) in [
        ("66068480", "66068481", "plugged_bytes modulo 4096 is 1, must be 0 to 0"),
        (
            r#""balloon":0"#,
            r#""balloon":1"#,
            "plugged_bytes modulo block_bytes is 4096, must be 0 to 0",
        ),
        (
            r#""requested_bytes":0"#,
            r#""requested_bytes":4096"#,
            "requested_bytes modulo block_bytes is 4096",
        ),
    ] {
        let error = read(text.replace(from, to)).expect_err(to).to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn header_must_be_first_and_occur_once() {
    let lines: Vec<_> = GOLDEN.lines().collect();
    let error = read(lines[1..].join("\n") + "\n").expect_err("no header").to_string();
    assert_eq!(error, "line 1 of the trace: the first line must be of type trace");
    let error = read(format!("{GOLDEN}{}\n", lines[0])).expect_err("two headers").to_string();
    assert_eq!(error, "line 8 of the trace: only the first line is of type trace");
    assert_eq!(read("").expect_err("empty").to_string(), "line 1 of the trace: the trace is empty");
}

#[test]
fn invalid_utf8_and_endless_line_are_refused() {
    let error =
        read([GOLDEN.as_bytes(), b"\xff\xfe\n"].concat()).expect_err("no UTF-8").to_string();
    assert_eq!(error, "line 8 of the trace: it is not UTF-8");
    let long = format!("{GOLDEN}{}", " ".repeat(MAX_LINE_BYTES + 1));
    let error = read(long).expect_err("too long").to_string();
    assert_eq!(error, "line 8 of the trace: it is longer than 66560 bytes");
    let longest = format!("{}{}\n", " ".repeat(MAX_LINE_BYTES - 5), r#"{"a":"#);
    let error = read(format!("{GOLDEN}{longest}")).expect_err("no entry").to_string();
    assert!(error.contains("(byte 6"), "a line of maximum length is accepted: {error}");
}

#[test]
fn reader_ends_after_an_error() {
    let text = damaged(3, r#""at_ms":1500"#, r#""at_ms":999"#);
    let mut reader = Reader::new(Cursor::new(text)).expect("the header is sound");
    assert_eq!(reader.header(), &header());
    assert!(matches!(reader.next(), Some(Ok(Entry::Host { .. }))));
    assert!(matches!(reader.next(), Some(Err(TraceError::Line { line: 3, .. }))));
    assert!(reader.next().is_none(), "following lines may describe another time");
}

#[test]
fn read_error_differs_from_damaged_line() {
    struct Fails;
    impl std::io::Read for Fails {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("gone"))
        }
    }
    let input = std::io::BufReader::new(std::io::Read::chain(GOLDEN.as_bytes(), Fails));
    let error = Trace::read(input).expect_err("gone");
    assert!(matches!(error, TraceError::Io { line: 8, .. }), "{error}");
}

/// If a recorder is killed, the trace has whole lines, and possibly an incomplete line at its end.
#[test]
fn whole_lines_of_truncated_trace_are_read_at_any_length() {
    for length in 0..GOLDEN.len() {
        let (kept, whole) = (&GOLDEN[..length], GOLDEN[..length].matches('\n').count());
        match read(kept) {
            Ok(trace) => {
                assert_eq!(trace.entries[..], expected_entries()[..whole - 1], "of {length} bytes");
                assert_eq!(trace.cut_off, !kept.ends_with('\n'));
            }
            Err(error) => assert!(whole == 0, "of {length} bytes: {error}"),
        }
    }
}

proptest! {
    /// Any content results either in entries or in an error that names a line.
    #[test]
    fn damage_does_not_cause_panic(at in 0..GOLDEN.len(), byte: u8, cut in 0..GOLDEN.len()) {
        let mut text = GOLDEN.as_bytes().to_vec();
        text[at] = byte;
        text.remove(cut);
        if let Err(error) = read(text) {
            prop_assert!(error.to_string().starts_with("line "));
        }
    }
}
