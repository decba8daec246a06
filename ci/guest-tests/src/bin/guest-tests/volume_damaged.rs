//! Tests of virtio-blk volumes with a damaged arena. The damaged arena should refuse writes, and
//! all others should work normally.

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, Pool};
use guest_tools::sectors::{Outcome, Program};
use pmem_volume::btt::InfoSource;

use crate::btt_cross::{Disk, Linux, check, seed, write};
use crate::volume::IO_LIMIT;

guest_tests::tests![damaged_arena_refuses_writes_and_the_other_accepts_them: 240 x 2];

/// Number of sectors to write in the intact arena, next to the damaged one.
const NEXT_ARENA_SECTORS: u64 = 256;

/// The first arena of one disk is damaged, and the second arena of the other disk.
fn damaged_arena_refuses_writes_and_the_other_accepts_them() -> Result<()> {
    let pool = Pool::create("96M")?;
    let mut disks = [
        Disk::create_with_two_arenas(&pool, "first", 36, 4096)?,
        Disk::create_with_two_arenas(&pool, "second", 40, 4096)?,
    ];
    let mut histories = disks.each_ref().map(|_| Vec::new());
    for (damaged, (disk, history)) in disks.iter_mut().zip(&mut histories).enumerate() {
        history.push(format!("discards:{}:3000:4", seed(70)?));
        history.push(Program::around(disk.arenas[1], "discards", seed(71)?, 400, 4));
        history.iter().try_for_each(|program| disk.write(program))?;
        disk.media.erase_lane(damaged, 3)?;
        disk.damaged = Some(damaged);
    }
    let linux = Linux::boot(&pool, &disks, Guest::builder(), "virtio-blk")?;
    disks.iter().try_for_each(|disk| is_logged(disk, &linux.guest.vmm_log()?))?;
    // All sectors should be readable, before and after the refused writes.
    linux.on_each(|number, node| check(node, &histories[number]))?;
    for (disk, node) in disks.iter().zip(&linux.nodes) {
        refuses_writes(disk, &linux, node).with_context(|| format!("Volume {}", disk.name))?;
    }
    linux.on_each(|number, node| check(node, &histories[number]))?;
    for (disk, history) in disks.iter().zip(&mut histories) {
        let border = disk.arenas[1];
        let next_arena_sector = match disk.damaged {
            Some(0) => border.next_multiple_of(8)..border + NEXT_ARENA_SECTORS,
            _ => (border - NEXT_ARENA_SECTORS) / 8 * 8..border,
        };
        history.push(format!(
            "writes:{}:300:2:{}-{}",
            seed(72)?,
            next_arena_sector.start,
            next_arena_sector.end
        ));
    }
    linux.on_each(|number, node| {
        let history = &histories[number];
        format!("{} && {}", write(node, &history[2]), check(node, history))
    })?;
    let metrics = linux.guest.metrics()?;
    for disk in &disks {
        let failed = metrics.value("foreshore_volume_failed", &[("volume", &disk.name)])?;
        ensure!(failed == 0.0, "Volume {} failed instead of one of its arenas", disk.name);
        let read_only =
            metrics.value("foreshore_volume_read_only_arenas", &[("volume", &disk.name)])?;
        let expected = f64::from(u8::from(disk.damaged.is_some()));
        ensure!(read_only == expected, "Volume {}: {read_only} arenas are read-only", disk.name);
    }
    let state = linux.guest.get("vm.info")?["state"].clone();
    ensure!(state == "Running", "The VM is {state}");
    linux.end(Some("I/O error"))?;
    for (disk, history) in disks.iter().zip(&histories) {
        // Both info blocks should record the error for the next user.
        for (number, (info, source)) in disk.media.arenas()?.into_iter().enumerate() {
            let expected = (disk.damaged == Some(number), InfoSource::Both);
            let found = (info.has_error, source);
            ensure!(
                found == expected,
                "Volume {}, arena {number}: {found:?} instead of {expected:?}",
                disk.name
            );
        }
        disk.verify_by_engine(&Outcome::of_history(disk.shape, history)?)?;
    }
    Ok(())
}

/// Checks that the VMM's log names the damaged arena with its sectors and the reason, and does not
/// name another arena.
fn is_logged(disk: &Disk, log: &str) -> Result<()> {
    let volume = format!("volume=\"{}\"", disk.name);
    let lines =
        log.lines().filter(|line| line.contains("refuses writes") && line.contains(&volume));
    let lines: Vec<_> = lines.collect();
    let damaged = disk.damaged.context("Not damaged")?;
    let first_sector = disk.arenas[damaged];
    let sectors =
        disk.arenas.get(damaged + 1).copied().unwrap_or(disk.shape.sectors) - first_sector;
    let words = [
        format!("arena={damaged} "),
        format!("first_sector={first_sector} "),
        format!("sectors={sectors} "),
        "lane 3 of the flog".to_owned(),
    ];
    let is_whole = lines.len() == 1 && words.iter().all(|word| lines[0].contains(word));
    ensure!(
        is_whole,
        "The log must have one line with {words:?} about {}; found {lines:?}\n{log}",
        disk.name
    );
    Ok(())
}

/// Checks that writes and discards at both ends of the damaged arena are I/O errors in the guest,
/// and that they are counted.
fn refuses_writes(disk: &Disk, linux: &Linux, node: &str) -> Result<()> {
    let errors = |operation| {
        let labels =
            [("volume", disk.name.as_str()), ("operation", operation), ("result", "error")];
        linux.guest.metric("foreshore_volume_operations_total", &labels)
    };
    let sectors = match disk.damaged {
        Some(0) => [0, disk.arenas[1] - 1],
        _ => [disk.arenas[1], disk.shape.sectors - 1],
    };
    for (tried, sector) in (1..).zip(sectors) {
        let write =
            format!("dd if=/dev/urandom of=/dev/{node} bs=4096 seek={sector} count=1 oflag=direct");
        let discard = format!("blkdiscard -o {} -l 4096 /dev/{node}", sector * 4096);
        for (operation, command) in [("write", write), ("discard", discard)] {
            let output = linux.guest.try_run(IO_LIMIT, &command)?;
            let is_error = output.code != 0 && output.stderr.contains("Input/output error");
            ensure!(is_error, "`{command}` in the damaged arena: {output:?}");
            let errors = errors(operation)?;
            ensure!(errors == f64::from(tried), "{errors} {operation}s failed instead of {tried}");
        }
    }
    Ok(())
}
