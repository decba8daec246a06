//! Reads traces. Their content is not trusted.

use std::io::{self, BufRead, Read};

use foreshore_proto::{Refusal, Report};
use thiserror::Error;

use super::wire::{Raw, RawDirection, RawDistance, RawHeader, RawHostZone, RawPlan, RawZone};
use super::{Entry, Header, HostZone, MAX_LINE_BYTES, RecordedPlan, TRACE_VERSION};
use crate::plan::Direction;
use crate::units::PAGE_BYTES;
use crate::{Distances, StorageSpace, TimeMs, ZoneId, ZoneSizes};

/// Largest amount of memory in a report, which is the physical memory that four levels of page
/// tables can map on x86-64.
const MAX_BYTES: u64 = 1 << 46;
/// Largest number of zones. The limit is the same as in a report.
const MAX_ZONES: usize = 256;
/// Largest number of distances. The limit on the length of a line is reached earlier.
const MAX_DISTANCES: usize = 4096;
/// Largest node number that Linux supports.
const MAX_NODE: u64 = 1023;
/// Largest time in a trace, which is one hundred years.
const MAX_AT_MS: u64 = 100 * 366 * 86_400_000;
const MAX_NAME_BYTES: usize = 128;
const MAX_REASON_BYTES: usize = 64;
/// Maximum number of characters of a trace that an error quotes.
const MAX_QUOTED_CHARS: usize = 128;

/// Reason why a trace could not be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file or stream could not be read.
    #[error("cannot read line {line} of the trace")]
    Io {
        /// Number of the line that was being read, from 1.
        line: u64,
        /// Error of the file or stream.
        #[source]
        source: io::Error,
    },
    /// A line is invalid.
    #[error("line {line} of the trace: {fault}")]
    Line {
        /// Number of the line, from 1.
        line: u64,
        /// Reason why the line is invalid.
        fault: Fault,
    },
}

/// Reason why a line is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// The trace is empty.
    #[error("the trace is empty")]
    Empty,
    /// The last line has no newline, because the recorder was killed while it wrote the line.
    #[error("it is truncated after {bytes} bytes")]
    CutOff {
        /// Number of bytes in the incomplete line.
        bytes: usize,
    },
    /// The line exceeds the maximum length.
    #[error("it is longer than {MAX_LINE_BYTES} bytes")]
    TooLong,
    /// The line is not valid JSON, or it lacks required fields.
    #[error("{0}")]
    Shape(String),
    /// The version of the format is not supported.
    #[error("the version is {0}, must be {TRACE_VERSION}")]
    Version(u32),
    /// The first line is not a header, or a later line is a header.
    #[error("{0}")]
    Order(&'static str),
    /// The report is invalid.
    #[error("report: {0}")]
    Report(Refusal),
    /// A value is out of bounds.
    #[error("{name} is {value}, must be {low} to {high}")]
    Range {
        /// Name of the value.
        name: &'static str,
        /// The value.
        value: u64,
        /// Lower bound.
        low: u64,
        /// Upper bound.
        high: u64,
    },
    /// The time is earlier than the time of a previous line.
    #[error("at_ms is {value}, but an earlier line has {last}")]
    Backwards {
        /// Time of this line.
        value: u64,
        /// Time of the previous line.
        last: u64,
    },
    /// The zones differ from the zones in the header.
    #[error("the zones are {found:?}, but the header has {expected:?}")]
    Zones {
        /// IDs of the zones in this line.
        found: Vec<u32>,
        /// IDs of the zones in the header.
        expected: Vec<u32>,
    },
    /// The balloon is not one of the zones in the header.
    #[error("the balloon is zone {0}, which does not exist")]
    NoZone(u32),
    /// A zone occurs twice in the line.
    #[error("zone {0} occurs twice")]
    Twice(u32),
    /// A text is too long, or contains invalid characters.
    #[error("{name} is {value:?}, must be up to {bound} bytes of {of}")]
    Text {
        /// Name of the text.
        name: &'static str,
        /// Beginning of the text, for the error message.
        value: String,
        /// Maximum length in bytes.
        bound: usize,
        /// Description of the valid characters.
        of: &'static str,
    },
}

/// Reads a trace line by line.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    header: Header,
    buffer: Vec<u8>,
    line: u64,
    last: TimeMs,
    ended: bool,
    cut_off: bool,
}

impl<R: BufRead> Reader<R> {
    /// Creates a reader and reads the header.
    pub fn new(mut input: R) -> Result<Self, TraceError> {
        let mut buffer = Vec::new();
        let at_line = |fault| TraceError::Line { line: 1, fault };
        if !read_line(&mut input, &mut buffer, 1)? {
            return Err(at_line(Fault::Empty));
        }
        let header = match parse(&buffer).map_err(at_line)? {
            Raw::Trace(raw) => check_header(raw).map_err(at_line)?,
            _ => return Err(at_line(Fault::Order("the first line must be of type trace"))),
        };
        Ok(Reader { input, header, buffer, line: 1, last: TimeMs(0), ended: false, cut_off: false })
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the number of the line that was read last, from 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// Returns true if the last line was skipped because it is incomplete, as
    /// after the recorder was killed during a write.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off
    }

    fn next_entry(&mut self) -> Result<Option<Entry>, TraceError> {
        let line = self.line + 1;
        if !read_line(&mut self.input, &mut self.buffer, line)? {
            return Ok(None);
        }
        self.line = line;
        let entry = parse(&self.buffer)
            .and_then(|raw| check_entry(raw, &self.header, self.last))
            .map_err(|fault| TraceError::Line { line, fault })?;
        self.last = entry.at();
        Ok(Some(entry))
    }
}

/// The iterator ends after an error, because lines after a damaged one may belong to another time.
impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Entry, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = match self.next_entry().transpose() {
            Some(Err(TraceError::Line { fault: Fault::CutOff { .. }, .. })) => {
                self.cut_off = true;
                None
            }
            next => next,
        };
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// A complete trace in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// First line of the trace.
    pub header: Header,
    /// Entries, in the order of their lines.
    pub entries: Vec<Entry>,
    /// True if the last line was skipped because it is incomplete, as after the
    /// recorder was killed during a write.
    pub cut_off: bool,
}

impl Trace {
    /// Reads a complete trace. Traces are long, so use a [`Reader`] unless all entries are needed
    /// at the same time.
    pub fn read(input: impl BufRead) -> Result<Self, TraceError> {
        let mut reader = Reader::new(input)?;
        let entries = reader.by_ref().collect::<Result<_, _>>()?;
        Ok(Trace { cut_off: reader.cut_off, header: reader.header, entries })
    }
}

/// Reads one line without its newline. Returns false at the end of the trace.
fn read_line(
    input: &mut impl BufRead,
    buffer: &mut Vec<u8>,
    line: u64,
) -> Result<bool, TraceError> {
    buffer.clear();
    // One byte more than the longest line and its newline, so that a longer line is detected.
    let most = MAX_LINE_BYTES as u64 + 1;
    input.take(most).read_until(b'\n', buffer).map_err(|source| TraceError::Io { line, source })?;
    let fault = match buffer.pop() {
        None => return Ok(false),
        Some(b'\n') => return Ok(true),
        Some(_) if buffer.len() >= MAX_LINE_BYTES => Fault::TooLong,
        Some(_) => Fault::CutOff { bytes: buffer.len() + 1 },
    };
    Err(TraceError::Line { line, fault })
}

fn parse(line: &[u8]) -> Result<Raw, Fault> {
    let text = std::str::from_utf8(line).map_err(|_| Fault::Shape("it is not UTF-8".to_owned()))?;
    // The parser's message may quote the trace. Its line number, which is always 1, is cut off.
    serde_json::from_str(text).map_err(|error| {
        let column = error.column();
        let reason = error.to_string();
        let reason = reason.split(" at line ").next().unwrap_or_default();
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        let reason: String = reason.chars().take(MAX_QUOTED_CHARS).map(printable).collect();
        // In valid JSON, a missing value or a value of the wrong type has no position.
        let location = if column == 0 { String::new() } else { format!(" (byte {column})") };
        Fault::Shape(format!("{reason}{location}"))
    })
}

fn in_range(name: &'static str, value: u64, low: u64, high: u64) -> Result<(), Fault> {
    if (low..=high).contains(&value) {
        Ok(())
    } else {
        Err(Fault::Range { name, value, low, high })
    }
}

fn text(
    name: &'static str,
    value: &str,
    bound: usize,
    of: &'static str,
    is_allowed: impl Fn(u8) -> bool,
) -> Result<(), Fault> {
    if value.len() <= bound && value.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(Fault::Text { name, value: value.chars().take(MAX_QUOTED_CHARS).collect(), bound, of })
}

fn check_header(raw: RawHeader) -> Result<Header, Fault> {
    if raw.version != TRACE_VERSION {
        return Err(Fault::Version(raw.version));
    }
    let printable = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    text("vm", &raw.vm, MAX_NAME_BYTES, "printable ASCII", printable)?;
    // Boot memory may be 0, because all of it may be in a balloon.
    in_range("boot_bytes", raw.boot_bytes, 0, MAX_BYTES)?;
    in_range("the number of zones", raw.zones.len() as u64, 0, MAX_ZONES as u64)?;
    let balloon = raw.balloon.map(ZoneId);
    let mut zones: Vec<ZoneSizes> = Vec::with_capacity(raw.zones.len());
    for zone in raw.zones {
        if zones.iter().any(|other| other.id.0 == zone.id) {
            return Err(Fault::Twice(zone.id));
        }
        zones.push(check_zone(zone, balloon)?);
    }
    if let Some(id) = balloon
        && zones.iter().all(|zone| zone.id != id)
    {
        return Err(Fault::NoZone(id.0));
    }
    in_range("the number of distances", raw.distances.len() as u64, 0, MAX_DISTANCES as u64)?;
    let mut distances = Distances::default();
    for RawDistance { from, to, distance } in raw.distances {
        in_range("from", from.into(), 0, MAX_NODE)?;
        in_range("to", to.into(), 0, MAX_NODE)?;
        in_range("distance", distance.into(), Distances::LOCAL.into(), u8::MAX.into())?;
        distances.set(from, to, distance);
    }
    Ok(Header { vm: raw.vm, boot_bytes: raw.boot_bytes, zones, balloon, distances })
}

fn check_zone(raw: RawZone, balloon: Option<ZoneId>) -> Result<ZoneSizes, Fault> {
    in_range("guest_numa_node", raw.guest_numa_node.into(), 0, MAX_NODE)?;
    in_range("block_bytes", raw.block_bytes, 4096, MAX_BYTES)?;
    in_range("max_bytes", raw.max_bytes, 0, MAX_BYTES)?;
    in_range("floor_bytes", raw.floor_bytes, 0, raw.max_bytes)?;
    let sizes = ZoneSizes {
        guest_numa_node: raw.guest_numa_node,
        block_bytes: raw.block_bytes,
        floor_bytes: raw.floor_bytes,
        requested_bytes: raw.requested_bytes,
        plugged_bytes: raw.plugged_bytes,
        // Traces do not contain drivers or shortfalls.
        ..ZoneSizes::empty(raw.id, raw.tier, raw.max_bytes)
    };
    check_requested(raw.requested_bytes, &sizes)?;
    check_plugged(raw.plugged_bytes, &sizes, balloon)?;
    Ok(sizes)
}

/// Checks that a requested size consists of whole blocks. The check also applies to a balloon zone.
fn check_requested(value: u64, zone: &ZoneSizes) -> Result<(), Fault> {
    in_range("requested_bytes", value, 0, zone.max_bytes)?;
    in_range("requested_bytes modulo block_bytes", value % zone.block_bytes, 0, 0)
}

/// Checks a plugged size. A balloon's size may be any number of pages, because its driver moves up
/// to 256 pages at a time.
fn check_plugged(value: u64, zone: &ZoneSizes, balloon: Option<ZoneId>) -> Result<(), Fault> {
    in_range("plugged_bytes", value, 0, zone.max_bytes)?;
    match balloon == Some(zone.id) {
        true => in_range("plugged_bytes modulo 4096", value % PAGE_BYTES, 0, 0),
        false => in_range("plugged_bytes modulo block_bytes", value % zone.block_bytes, 0, 0),
    }
}

fn check_entry(raw: Raw, header: &Header, last: TimeMs) -> Result<Entry, Fault> {
    let zones = &header.zones;
    match raw {
        Raw::Trace(_) => Err(Fault::Order("only the first line is of type trace")),
        Raw::Report { at_ms, report } => {
            let at = check_time(at_ms, last)?;
            let report = Report::try_from(*report).map_err(Fault::Report)?;
            Ok(Entry::Report { at, report: Box::new(report) })
        }
        Raw::Host { at_ms, zones: raw, pool_free_bytes, storage } => {
            let at = check_time(at_ms, last)?;
            storage.as_ref().map_or(Ok(()), check_storage)?;
            Ok(Entry::Host { at, zones: check_host(&raw, header)?, pool_free_bytes, storage })
        }
        Raw::Plan(raw) => {
            let at = check_time(raw.at_ms, last)?;
            Ok(Entry::Plan { at, plan: check_plan(raw, zones)? })
        }
    }
}

fn check_time(at_ms: u64, last: TimeMs) -> Result<TimeMs, Fault> {
    in_range("at_ms", at_ms, 0, MAX_AT_MS)?;
    if at_ms < last.0 {
        return Err(Fault::Backwards { value: at_ms, last: last.0 });
    }
    Ok(TimeMs(at_ms))
}

/// Checks that these zones are the zones of the header, in the same order.
fn same_zones(found: impl Iterator<Item = u32> + Clone, zones: &[ZoneSizes]) -> Result<(), Fault> {
    let expected = zones.iter().map(|zone| zone.id.0);
    if found.clone().eq(expected.clone()) {
        return Ok(());
    }
    Err(Fault::Zones { found: found.take(MAX_ZONES).collect(), expected: expected.collect() })
}

fn check_host(raw: &[RawHostZone], header: &Header) -> Result<Vec<HostZone>, Fault> {
    same_zones(raw.iter().map(|zone| zone.id), &header.zones)?;
    let checked = raw.iter().zip(&header.zones).map(|(raw, zone)| {
        check_requested(raw.requested_bytes, zone)?;
        check_plugged(raw.plugged_bytes, zone, header.balloon)?;
        Ok(HostZone {
            id: zone.id,
            requested_bytes: raw.requested_bytes,
            plugged_bytes: raw.plugged_bytes,
        })
    });
    checked.collect()
}

/// Checks the order of the watermarks. The other sizes may be anything, because they are those of
/// the pool.
fn check_storage(storage: &StorageSpace) -> Result<(), Fault> {
    in_range("low_bytes", storage.low_bytes, storage.min_bytes, storage.high_bytes)
}

fn check_plan(raw: RawPlan, zones: &[ZoneSizes]) -> Result<RecordedPlan, Fault> {
    let word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    const WORD: &str = "a-z, 0-9 and _";
    text("reason", &raw.reason, MAX_REASON_BYTES, WORD, word)?;
    if let Some(limited_by) = &raw.limited_by {
        text("limited_by", limited_by, MAX_REASON_BYTES, WORD, word)?;
    }
    if !raw.zones.is_empty() {
        same_zones(raw.zones.iter().map(|target| target.id), zones)?;
    }
    for (target, zone) in raw.zones.iter().zip(zones) {
        check_requested(target.requested_bytes, zone)?;
    }
    Ok(RecordedPlan {
        direction: match raw.direction {
            RawDirection::Grow => Direction::Grow,
            RawDirection::Shrink => Direction::Shrink,
            RawDirection::Hold => Direction::Hold,
        },
        reason: raw.reason,
        limited_by: raw.limited_by,
        wanted_bytes: raw.wanted_bytes,
        targets: raw
            .zones
            .iter()
            .map(|target| (ZoneId(target.id), target.requested_bytes))
            .collect(),
        dry_run: raw.dry_run,
    })
}
