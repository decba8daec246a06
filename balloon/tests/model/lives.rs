//! Lives in which something was wrong, as short as they become.

use super::*;

/// What a guest says: how much of each zone is free and how much of the rest is cached, in thousandths, and what is idle.
#[derive(Default)]
struct Said {
    free_permille: [u64; ZONES],
    cached_permille: u64,
    idle: Idle,
}

fn said(said: Said) -> Happening {
    Happening::Report {
        free_permille: said.free_permille,
        cached_permille: said.cached_permille,
        stall_ms: 0,
        counted: Counted::default(),
        swap_used_mib: 0,
        idle: said.idle,
        late: false,
    }
}

fn free(free_permille: [u64; ZONES], cached_permille: u64) -> Happening {
    said(Said { free_permille, cached_permille, ..Said::default() })
}

/// Nothing is free.
fn full() -> Happening {
    said(Said::default())
}

fn squeeze(zone: usize) -> Happening {
    Happening::Squeeze { zones: std::array::from_fn(|index| index == zone), above: true }
}

fn resume() -> Happening {
    Happening::Resume { zone: None }
}

fn follow(zone: usize) -> Happening {
    Happening::Follow { zone, permille: 1000 }
}

fn lived(index: usize, life: &[(Happening, u64)]) {
    World::new(policy(index), None).live(life).expect("as it must be");
}

/// `memorage` and `pmb` gave back in place of what had come and was not free.
#[test]
fn what_has_just_come_is_nobodys_surplus() {
    let bounds = |floor_mib, more_mib| Happening::Bounds { floor_mib, more_mib };
    let calm = [
        (bounds(258, 0), 1),
        (free([0, 0, 0, 367], 0), 1),
        (Happening::Follow { zone: 3, permille: 25 }, 6_202),
        (bounds(0, 258), 32),
        (follow(2), 341),
        (full(), 3_269),
        (follow(3), 66),
        (full(), 90),
    ];
    lived(9, &calm);
    let units = [
        (squeeze(1), 1),
        (Happening::Tick, 1),
        (resume(), 2_626),
        (full(), 2_374),
        (full(), 200),
        (full(), 4_800),
        (follow(1), 1),
        (free([0, 100, 0, 0], 0), 1),
    ];
    lived(7, &units);
}

/// `psi` gave back page cache that is touched in place of what somebody had asked for and was on its way.
#[test]
fn what_is_on_its_way_is_not_idle() {
    let touched = said(Said { cached_permille: 208, idle: Some((19, 10_000)), ..Said::default() });
    let life = [
        (Happening::Squeeze { zones: [false; ZONES], above: false }, 1),
        (free([0, 0, 14, 0], 103), 4),
        (full(), 1),
        (Happening::Pin { zone: 1, mib: 76 }, 6_567),
        (follow(3), 2),
        (touched, 3_430),
    ];
    lived(0, &life);
}
