//! Comparison of random operations on the engine with the same operations on a list of sectors. The
//! engine is reopened from time to time.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Operation {
    Write { first: u64, sectors: u64 },
    Discard { first: u64, sectors: u64 },
    WriteZeroes { first: u64, sectors: u64 },
    Read { first: u64, sectors: u64 },
    Flush,
    Reopen,
}

/// Number of sectors on each side of the boundary between two arenas. The number is small, so that
/// each sector is written often.
const AROUND: u64 = 40;

fn operations() -> impl Strategy<Value = Operation> {
    let part = || (0..2 * AROUND, 1..100u64);
    prop_oneof![
        6 => part().prop_map(|(first, sectors)| Operation::Write { first, sectors }),
        2 => part().prop_map(|(first, sectors)| Operation::Discard { first, sectors }),
        1 => part().prop_map(|(first, sectors)| Operation::WriteZeroes { first, sectors }),
        3 => part().prop_map(|(first, sectors)| Operation::Read { first, sectors }),
        1 => Just(Operation::Flush),
        1 => Just(Operation::Reopen),
    ]
}

fn run(sector_bytes: u32, operations: Vec<Operation>) {
    let media = format_two_arenas(sector_bytes);
    let mut engine = Engine::open(&media).unwrap();
    let base = engine.arenas()[1].first_sector - AROUND;
    // Version of each sector. Version 0 reads as zeros.
    let mut model = vec![0u64; 2 * AROUND as usize];
    let expected = |model: &[u64], at: u64| match model[at as usize] {
        0 => vec![0; sector_bytes as usize],
        version => content(base + at, version, sector_bytes),
    };
    let clip = |first: u64, sectors: u64| first..(first + sectors).min(2 * AROUND);
    for (version, operation) in (1..).zip(operations) {
        match operation {
            Operation::Write { first, sectors } => {
                let part = clip(first, sectors);
                part.clone().for_each(|at| model[at as usize] = version);
                let bytes: Vec<u8> = part.flat_map(|at| expected(&model, at)).collect();
                engine.write(base + first, &bytes).unwrap();
            }
            Operation::Discard { first, sectors } => {
                let part = clip(first, sectors);
                engine.discard(base + part.start..base + part.end).unwrap();
                part.for_each(|at| model[at as usize] = 0);
            }
            Operation::WriteZeroes { first, sectors } => {
                let part = clip(first, sectors);
                engine.write_zeroes(base + part.start..base + part.end).unwrap();
                part.for_each(|at| model[at as usize] = 0);
            }
            Operation::Read { first, sectors } => {
                let part = clip(first, sectors);
                let mut bytes = vec![0xee; part.clone().count() * sector_bytes as usize];
                engine.read(base + first, &mut bytes).unwrap();
                assert!(bytes == part.flat_map(|at| expected(&model, at)).collect::<Vec<u8>>());
            }
            Operation::Flush => engine.flush().unwrap(),
            Operation::Reopen => {
                drop(engine);
                let report = check(&media);
                assert!(report.is_clean(), "{report:?}");
                engine = Engine::open(&media).unwrap();
            }
        }
    }
    for at in 0..2 * AROUND {
        assert!(read(&engine, base + at) == expected(&model, at), "sector {at} of those in use");
    }
    assert!(check(&media).is_clean());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn engine_agrees_with_a_list_of_sectors(
        sector_bytes in prop_oneof![Just(512u32), Just(4096)],
        operations in prop::collection::vec(operations(), 1..60),
    ) {
        run(sector_bytes, operations);
    }
}
