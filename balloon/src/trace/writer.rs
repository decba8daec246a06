//! Writes traces.

use std::io;

use foreshore_proto::{Report, encode_line};

use super::wire::{Line, RawDirection, RawHeader, RawHostZone, RawPlan, RawTarget};
use super::{Header, TRACE_VERSION};
use crate::plan::{Direction, Plan};
use crate::{HostView, StorageSpace, TimeMs};

/// Writes a trace. Each line is passed to the output in a single call, so a truncated trace ends in
/// at most one incomplete line.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    line: Vec<u8>,
    zones: Vec<RawHostZone>,
    pool: Option<(u64, Option<StorageSpace>)>,
}

impl<W: io::Write> Writer<W> {
    /// Creates a writer and writes the header of the trace.
    pub fn new(out: W, header: &Header) -> io::Result<Self> {
        let zones: Vec<RawHostZone> = header.zones.iter().map(RawHostZone::from).collect();
        let mut writer = Writer { out, line: Vec::new(), zones, pool: None };
        writer.write(&Line::Trace(RawHeader {
            version: TRACE_VERSION,
            vm: header.vm.clone(),
            boot_bytes: header.boot_bytes,
            zones: header.zones.iter().map(Into::into).collect(),
            balloon: header.balloon.map(|id| id.0),
            distances: header.distances.iter().map(Into::into).collect(),
        }))?;
        Ok(writer)
    }

    /// Writes a report.
    pub fn report(&mut self, at: TimeMs, report: &Report) -> io::Result<()> {
        self.write(&Line::Report { at_ms: at.0, report: report.as_raw() })
    }

    /// Writes the host's sizes if they have changed since they were last written. Returns true in
    /// that case.
    pub fn host(&mut self, at: TimeMs, host: &HostView) -> io::Result<bool> {
        let zones = host.zones.iter().map(RawHostZone::from);
        if self.pool == Some((host.pool_free_bytes, host.storage))
            && zones.clone().eq(self.zones.iter().copied())
        {
            return Ok(false);
        }
        self.write_host(at, host, 0)?;
        Ok(true)
    }

    /// Writes the host's sizes after `lost_lines` lines could not be written, even if the sizes
    /// have not changed.
    pub fn host_after_loss(
        &mut self,
        at: TimeMs,
        host: &HostView,
        lost_lines: u64,
    ) -> io::Result<()> {
        self.write_host(at, host, lost_lines)
    }

    fn write_host(&mut self, at: TimeMs, host: &HostView, lost_lines: u64) -> io::Result<()> {
        let zones: Vec<RawHostZone> = host.zones.iter().map(RawHostZone::from).collect();
        let HostView { pool_free_bytes, storage, .. } = *host;
        let at_ms = at.0;
        self.write(&Line::Host { at_ms, zones: &zones, pool_free_bytes, storage, lost_lines })?;
        self.zones = zones;
        self.pool = Some((pool_free_bytes, storage));
        Ok(())
    }

    /// Writes a plan for `host`. The targets are written only if they differ from the requests in
    /// `host`.
    pub fn plan(&mut self, at: TimeMs, plan: &Plan, host: &HostView) -> io::Result<()> {
        let changes = plan.changes(host).next().is_some();
        let targets = plan.targets.iter().filter(|_| changes);
        self.write(&Line::Plan(RawPlan {
            at_ms: at.0,
            direction: match plan.direction {
                Direction::Grow => RawDirection::Grow,
                Direction::Shrink => RawDirection::Shrink,
                Direction::Hold => RawDirection::Hold,
            },
            reason: plan.reason.label().to_owned(),
            limited_by: plan.limited_by.map(|reason| reason.label().to_owned()),
            wanted_bytes: plan.wanted_bytes,
            zones: targets
                .map(|target| RawTarget {
                    id: target.zone.0,
                    requested_bytes: target.requested_bytes,
                })
                .collect(),
            dry_run: plan.dry_run,
        }))
    }

    /// Flushes the output.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Returns the output.
    pub fn get_ref(&self) -> &W {
        &self.out
    }

    /// Returns a mutable reference to the output.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.out
    }

    /// Ends the trace and returns the output.
    pub fn into_inner(self) -> W {
        self.out
    }

    fn write(&mut self, line: &Line<'_>) -> io::Result<()> {
        encode_line(line, &mut self.line);
        self.out.write_all(&self.line)
    }
}
