//! Messages of an agent.
//!
//! The bytes from the fuzzer become almost valid reports. Like data from a socket, a message may
//! arrive in two pieces. A line reader and the intake parse the pieces, and a controller turns
//! the reports into plans. A simulated host follows the plans completely, partly or not at all. No
//! input may cause a panic, and every plan should respect the bounds of the controller's rules.

use balloon::controller::{Controller, Event, Rules};
use balloon::params::Setting;
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;
use balloon::proto::{
    AgentMessage, Blocks, Cause, Counters, KernelUse, LineReader, MAX_LINE_BYTES, Memory, NextLine,
    NodeBlocks, NodeIdle, OnlinePolicy, PROTOCOL_VERSION, RawAgentMessage, RawHello, RawReport,
    Report, Stall, Zone, ZoneKind, encode_line,
};
use balloon::{HostView, Intake, MIB, Tier, TimeMs, ZoneSizes};

use super::cursor::Cursor;

const BOOT_BYTES: u64 = 512 * MIB;
const POOL_BYTES: u64 = 768 * MIB;
const PAGE: u64 = 4096;

/// Sends the messages that `bytes` describe, and panics if a report or a plan is invalid.
pub(crate) fn agent_report(bytes: &[u8]) {
    agent_report_by(bytes, |rules| rules);
}

/// Works like [`agent_report`], but the controller uses the rules that `wrong` returns. The plans
/// are still checked against the original rules, so the checks should detect the difference.
pub(crate) fn agent_report_by(bytes: &[u8], wrong: impl FnOnce(Rules) -> Rules) {
    let mut cursor = Cursor::new(bytes);
    let policy = policy(&mut cursor);
    let ceiling_bytes = cursor.pick(&[1 << 46, 256 * MIB, 64 * MIB, 0]);
    let floor_bytes = cursor.pick(&[0, 32 * MIB, 128 * MIB]).min(ceiling_bytes);
    let rules = Rules { ceiling_bytes, floor_bytes, ..Rules::default() };
    let mut vm = Vm {
        controller: Controller::new(policy, wrong(rules.clone())).expect("in bounds"),
        rules,
        reader: LineReader::new(),
        intake: Intake::new(TimeMs(0)),
        host: host(&mut cursor),
        now: TimeMs(0),
        seq: 0,
        counters: Counters::default(),
        stalled_us: 0,
    };
    let mut line = Vec::new();
    vm.hello(&mut line);
    vm.send(&line, line.len());
    while !cursor.is_done() {
        vm.turn(&mut cursor);
    }
}

fn policy(cursor: &mut Cursor<'_>) -> Policy {
    let policy = Policy::from_name(cursor.pick(&Policy::NAMES)).expect("listed");
    let setting = match policy {
        Policy::Psi(_) | Policy::Off => return policy,
        Policy::Fixed(_) => ("size", cursor.pick(&[512 * MIB, 16 * MIB, 1 << 40])),
        _ => ("watermark-scale", cursor.pick(&[32, 1, 1024])),
    };
    policy.with([(setting.0, &Setting::Number(setting.1))]).expect("in bounds")
}

/// Creates a host with a DRAM zone and a PM zone. The cursor selects the block size of the PM zone
/// and the plugged sizes.
fn host(cursor: &mut Cursor<'_>) -> HostView {
    let mut host = HostView { boot_bytes: BOOT_BYTES, ..HostView::default() };
    host.zones =
        vec![ZoneSizes::empty(0, Tier::Dram, 128 * MIB), ZoneSizes::empty(1, Tier::Pm, 1024 * MIB)];
    host.zones[1].block_bytes = cursor.pick(&[2 * MIB, 4 * MIB]);
    for (zone, plugged_bytes) in
        host.zones.iter_mut().zip(cursor.pick(&[[0, 0], [128, 512], [64, 0]]))
    {
        (zone.requested_bytes, zone.plugged_bytes) = (plugged_bytes * MIB, plugged_bytes * MIB);
    }
    host
}

/// A VM and its agent.
struct Vm {
    controller: Controller,
    rules: Rules,
    reader: LineReader,
    intake: Intake,
    host: HostView,
    now: TimeMs,
    seq: u64,
    counters: Counters,
    stalled_us: u64,
}

impl Vm {
    /// Advances the time, resizes the guest toward its requested size, and sends a message.
    fn turn(&mut self, cursor: &mut Cursor<'_>) {
        self.now = self.now + cursor.pick(&[50, 100, 1_000, 1_000, 3_000, 6_000, 60_000, 0, 1]);
        let permille = cursor.pick(&[1000, 1000, 500, 0]);
        for zone in &mut self.host.zones {
            let way = zone.requested_bytes.abs_diff(zone.plugged_bytes) * permille / 1000;
            let way = way - way % zone.block_bytes;
            match zone.requested_bytes > zone.plugged_bytes {
                true => zone.plugged_bytes += way,
                false => zone.plugged_bytes -= way,
            }
        }
        let lent_bytes = self.host.zones[1].plugged_bytes;
        self.host.pool_free_bytes = POOL_BYTES.saturating_sub(lent_bytes);

        let mut line = Vec::new();
        match cursor.number(1) {
            252..=255 => {
                self.intake.connected();
                self.seq = 0;
                self.hello(&mut line);
            }
            236..=251 => return self.step(Event::Tick),
            232..=235 => line.extend((0..cursor.number(1) % 16).map(|_| cursor.number(1) as u8)),
            _ => encode_line(&RawAgentMessage::Report(self.report(cursor)), &mut line),
        }
        if line.ends_with(b"\n") {
            line.pop();
        }
        mutate(&mut line, cursor);
        line.push(b'\n');
        let cut = cursor.pick(&[line.len(), 1, line.len() / 2]);
        self.send(&line, cut.min(line.len()));
    }

    fn hello(&self, line: &mut Vec<u8>) {
        let hello = RawHello {
            version: PROTOCOL_VERSION,
            agent_version: "0.1.0".to_owned(),
            kernel_release: "6.12".to_owned(),
            kernel_version: String::new(),
            preemption: "voluntary".to_owned(),
            page_size_bytes: PAGE,
        };
        encode_line(&RawAgentMessage::Hello(hello), line);
    }

    /// Creates a report of a guest with the host's sizes. Some values are impossible.
    fn report(&mut self, cursor: &mut Cursor<'_>) -> RawReport {
        self.seq += 1;
        let seq = odd(cursor, self.seq, &[self.seq + 1, self.seq - 1, 1 << 60]);
        let total_bytes = BOOT_BYTES * 15 / 16 + self.host.plugged_bytes();
        let mut part = |of: u64| match cursor.number(1) {
            255 => u64::MAX,
            254 => of.saturating_add(1),
            253 => 1 << 53,
            part => of / 256 * part,
        };
        let free_bytes = part(total_bytes);
        let available_bytes = part(total_bytes);
        let swap_free_bytes = part(1 << 30);
        let idle_bytes = part(total_bytes);
        let happened = part(1 << 16) % (1 << 40);
        let counts = [
            &mut self.counters.pswpout,
            &mut self.counters.workingset_refault_file,
            &mut self.counters.pgscan_kswapd,
            &mut self.counters.oom_kill,
        ];
        *cursor.pick_of(counts) += happened;
        self.stalled_us += cursor.pick(&[0, 0, 50_000, 1_000_000]);
        self.stalled_us = self.stalled_us.min(self.now.0 * 1000);
        let zone = |node: u32, kind, managed_bytes: u64, free_bytes: u64| Zone {
            node,
            kind,
            free_pages: free_bytes / PAGE,
            min_pages: 500,
            low_pages: 625,
            high_pages: 750,
            managed_pages: managed_bytes / PAGE,
            largest_free_blocks: Some(free_bytes / (4 * MIB)),
            user_pages: Some(managed_bytes.saturating_sub(free_bytes) / PAGE),
            protected_pages: None,
        };
        let mut zones = vec![zone(
            0,
            ZoneKind::Dma32,
            total_bytes,
            free_bytes.min(total_bytes - total_bytes / 4),
        )];
        for sizes in self.host.zones.iter().filter(|sizes| sizes.plugged_bytes > 0) {
            let free_bytes = cursor.pick(&[sizes.plugged_bytes, 0, sizes.plugged_bytes / 2]);
            let free_bytes = odd(cursor, free_bytes, &[1 << 62, sizes.plugged_bytes + PAGE]);
            zones.push(zone(
                sizes.guest_numa_node,
                ZoneKind::Movable,
                sizes.plugged_bytes,
                free_bytes,
            ));
        }
        let node = NodeBlocks { node: 0, online_bytes: total_bytes, ..NodeBlocks::default() };
        let kernel_bytes = cursor.pick(&[0, total_bytes / 8, total_bytes / 2]);
        let kernel = KernelUse {
            slab_reclaimable_bytes: odd(cursor, kernel_bytes, &[u64::MAX, 1 << 45]),
            unused_dentries: cursor.pick(&[
                None,
                Some(0),
                Some(kernel_bytes / 192),
                Some(u64::MAX),
            ]),
            ..KernelUse::default()
        };
        RawReport {
            version: PROTOCOL_VERSION,
            seq,
            monotonic_ms: self.now.0 + odd(cursor, 0, &[100, 4_000, 1 << 50]),
            cause: cursor.pick(&[Cause::Rest, Cause::Watermark, Cause::Stall]),
            memory: Memory {
                total_bytes,
                free_bytes,
                available_bytes,
                cached_bytes: available_bytes.saturating_sub(free_bytes),
                anon_bytes: total_bytes.saturating_sub(available_bytes),
                swap_total_bytes: 1 << 30,
                swap_free_bytes,
            },
            kernel: cursor.pick(&[Some(kernel), None]),
            stall: Stall { some_us: self.stalled_us, ..Stall::default() },
            zones,
            counters: self.counters,
            blocks: Blocks {
                online_policy: cursor.pick(&[OnlinePolicy::OnlineMovable, OnlinePolicy::Online]),
                block_bytes: cursor.pick(&[128 * MIB, 0]),
                nodes: vec![node],
            },
            idle: vec![NodeIdle {
                node: 0,
                idle_bytes,
                span_ms: odd(cursor, 60_000, &[0, u64::MAX]),
            }],
        }
    }

    fn send(&mut self, line: &[u8], cut: usize) {
        let (first, second) = line.split_at(cut);
        for mut piece in [first, second] {
            // A line borrows the reader, so the messages are collected first.
            let mut said = Vec::new();
            while let Some(next) = self.reader.next(&mut piece) {
                said.push(match next {
                    NextLine::Line(line) => self.intake.accept_line(line, self.now),
                    NextLine::Refused(refusal) => Err(refusal),
                });
            }
            for message in said {
                match message {
                    Ok(AgentMessage::Report(report)) => self.believe(&report),
                    Ok(AgentMessage::Hello(_)) => {}
                    Err(refusal) => {
                        assert!(!refusal.label().is_empty() && refusal.to_string().len() < 4096)
                    }
                }
            }
        }
    }

    fn believe(&mut self, report: &Report) {
        let memory = report.memory();
        let parts = [memory.free_bytes, memory.available_bytes];
        assert!(parts.into_iter().all(|part| part <= memory.total_bytes), "{memory:?}");
        assert!(memory.swap_free_bytes <= memory.swap_total_bytes, "{memory:?}");
        self.step(Event::Report(report));
    }

    fn step(&mut self, event: Event<'_>) {
        let plan = self.controller.step(event, &self.host, self.now);
        self.check(&plan);
        for (zone, target) in self.host.zones.iter_mut().zip(&plan.targets) {
            zone.requested_bytes = target.requested_bytes;
        }
    }

    fn check(&self, plan: &Plan) {
        let (host, rules) = (&self.host, &self.rules);
        assert_eq!(plan.targets.len(), host.zones.len());
        for (zone, target) in host.zones.iter().zip(&plan.targets) {
            let bytes = target.requested_bytes;
            assert!(
                target.zone == zone.id && bytes.is_multiple_of(zone.block_bytes),
                "{zone:?}: {bytes}"
            );
            assert!((zone.floor_bytes..=zone.max_bytes).contains(&bytes), "{zone:?}: {bytes}");
        }
        let (before, after) = (host.requested_bytes(), plan.requested_bytes());
        match plan.direction {
            Direction::Grow => {
                assert!(
                    after > before && after <= rules.ceiling_bytes,
                    "{after} after {before}: {plan:?}"
                );
                let is_followed =
                    host.zones.iter().all(|zone| zone.requested_bytes == zone.plugged_bytes);
                let new_pm =
                    plan.targets[1].requested_bytes.saturating_sub(host.zones[1].plugged_bytes);
                assert!(
                    !is_followed || new_pm <= host.pool_free_bytes,
                    "plan requests more PM than is free: {plan:?}"
                );
            }
            Direction::Shrink => {
                assert!(
                    after < before && after >= rules.floor_bytes,
                    "{after} after {before}: {plan:?}"
                );
                let share = host.plugged_bytes() * rules.shrink_share_permille / 1000;
                let step = rules.shrink_step_bytes.max(share);
                assert!(
                    before - after <= step,
                    "{after} after {before}, more than {step}: {plan:?}"
                );
            }
            // A withdrawn request is lowered to the plugged size. If the total would then be below
            // the VM's floor, the controller requests the difference from another zone, rounded up
            // to blocks.
            Direction::Hold => {
                let block_bytes = host.zones.iter().map(|zone| zone.block_bytes).max().unwrap_or(0);
                let keeps_floor = after < rules.floor_bytes.saturating_add(block_bytes);
                for (zone, target) in host.zones.iter().zip(&plan.targets) {
                    let (now, then) = (zone.requested_bytes, target.requested_bytes);
                    assert!(
                        keeps_floor || then <= now.max(zone.plugged_bytes),
                        "{zone:?}: {plan:?}"
                    );
                }
            }
        }
    }
}

/// Returns `sane` in 15 of 16 cases, and otherwise one of the values in `odd`.
fn odd(cursor: &mut Cursor<'_>, sane: u64, odd: &[u64]) -> u64 {
    if cursor.number(1) < 240 { sane } else { cursor.pick(odd) }
}

/// Corrupts some of the lines in ways that the protocol forbids.
fn mutate(line: &mut Vec<u8>, cursor: &mut Cursor<'_>) {
    let values = [
        "-1",
        "1e400",
        "1.5",
        "18446744073709551615",
        "18446744073709551616",
        "null",
        "\"5\"",
        "[]",
        "{}",
        "0",
        "9007199254740993",
    ];
    match cursor.number(1) {
        // Replaces one value by a value of another type or size.
        224..=239 => {
            let colons =
                line.iter().enumerate().filter(|(_, byte)| **byte == b':').map(|(at, _)| at);
            let colons: Vec<usize> = colons.collect();
            let Some(at) = colons.get(cursor.number(1) as usize % colons.len().max(1)) else {
                return;
            };
            let ends = |byte: &u8| [b',', b'}', b']'].contains(byte);
            let end = line[*at..].iter().position(ends).map_or(line.len(), |len| at + len);
            line.splice(at + 1..end, cursor.pick(&values).bytes());
        }
        240..=247 if !line.is_empty() => {
            let at = cursor.number(2) as usize % line.len();
            line[at] ^= 1 << (cursor.number(1) % 8);
        }
        248..=249 if !line.is_empty() => line.truncate(cursor.number(2) as usize % line.len()),
        250..=251 => line.extend_from_within(line.len() / 2..),
        252..=253 => line.insert(line.len() / 2, b'\n'),
        // Nests lists deeper than a parser should recurse.
        254 => line.splice(0..0, [b'['; 20_000]).for_each(drop),
        255 => line.splice(0..0, vec![b' '; MAX_LINE_BYTES]).for_each(drop),
        _ => {}
    }
}
