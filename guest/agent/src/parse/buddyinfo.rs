//! /proc/buddyinfo.

use foreshore_proto::{LARGEST_BLOCK_BYTES, Zone};

use super::zoneinfo::zone_of;
use super::{ParseError, lines, number, words};

const FILE: &str = "/proc/buddyinfo";

/// The order of the blocks that are counted: 1024 pages of 4 KiB.
const LARGEST_ORDER: usize = 10;

/// Fills in how many of the largest blocks each of `zones` has free. A kernel whose allocator keeps
/// none that large leaves that unknown.
pub fn buddyinfo(text: &[u8], zones: &mut [Zone]) -> Result<(), ParseError> {
    zones.iter_mut().for_each(|zone| zone.largest_free_blocks = None);
    for line in lines(text) {
        if !line.starts_with(b"Node ") {
            continue;
        }
        let (node, kind) = zone_of(line, FILE)?;
        let Some(zone) = zones.iter_mut().find(|zone| (zone.node, zone.kind) == (node, kind))
        else {
            continue;
        };
        // `Node 0, zone DMA32`, and a column for each order.
        for (above, word) in words(line).skip(4 + LARGEST_ORDER).enumerate() {
            let count =
                number(word).ok_or(ParseError::NotANumber { file: FILE, field: "count" })?;
            let blocks = count.saturating_mul(1u64.checked_shl(above as u32).unwrap_or(u64::MAX));
            zone.largest_free_blocks =
                Some(zone.largest_free_blocks.unwrap_or(0).saturating_add(blocks));
        }
        // The zones were read before: memory that has come online since must not make a report that
        // is refused.
        let bound = zone.managed_pages / (LARGEST_BLOCK_BYTES / 4096);
        zone.largest_free_blocks = zone.largest_free_blocks.map(|blocks| blocks.min(bound));
    }
    Ok(())
}

/// Fills in how many pages each of `zones` has free, and returns how many that are in all. `None`
/// if the text does not tell of exactly these zones.
pub fn free_pages(text: &[u8], zones: &mut [Zone]) -> Result<Option<u64>, ParseError> {
    let (mut count, mut sum) = (0, 0u64);
    for line in lines(text).filter(|line| line.starts_with(b"Node ")) {
        let (node, kind) = zone_of(line, FILE)?;
        let Some(zone) = zones.iter_mut().find(|zone| (zone.node, zone.kind) == (node, kind))
        else {
            return Ok(None);
        };
        zone.free_pages = 0;
        for (order, word) in words(line).skip(4).enumerate() {
            let blocks =
                number(word).ok_or(ParseError::NotANumber { file: FILE, field: "count" })?;
            let pages = blocks.saturating_mul(1u64.checked_shl(order as u32).unwrap_or(u64::MAX));
            zone.free_pages = zone.free_pages.saturating_add(pages);
        }
        count += 1;
        sum = sum.saturating_add(zone.free_pages);
    }
    Ok((count == zones.len()).then_some(sum))
}

#[cfg(test)]
mod tests {
    use foreshore_proto::ZoneKind;

    use super::super::zoneinfo;
    use super::*;

    fn parse(zone_text: &[u8], text: &[u8]) -> Vec<(u32, ZoneKind, Option<u64>)> {
        let mut zones = Vec::new();
        zoneinfo(zone_text, &mut zones).expect("parses");
        buddyinfo(text, &mut zones).expect("parses");
        zones.iter().map(|zone| (zone.node, zone.kind, zone.largest_free_blocks)).collect()
    }

    fn zone(managed_pages: u64) -> Zone {
        Zone { kind: ZoneKind::Normal, managed_pages, ..Zone::default() }
    }

    fn blocks_of(text: &str, managed_pages: u64) -> Option<u64> {
        let mut zones = [zone(managed_pages)];
        buddyinfo(text.as_bytes(), &mut zones).expect("parses");
        zones[0].largest_free_blocks
    }

    #[test]
    fn guests_that_are_filled_into_a_node_of_their_own() {
        let zones = |dma32, pm| {
            [
                (0, ZoneKind::Dma, Some(0)),
                (0, ZoneKind::Dma32, Some(dma32)),
                (0, ZoneKind::Movable, Some(0)),
                (1, ZoneKind::Movable, Some(pm)),
            ]
        };
        let of_6_1 = parse(
            include_bytes!("../../tests/data/6.1-filled/zoneinfo"),
            include_bytes!("../../tests/data/6.1-filled/buddyinfo"),
        );
        assert_eq!(of_6_1, zones(7, 73));
        let of_6_12 = parse(
            include_bytes!("../../tests/data/6.12-filled/zoneinfo"),
            include_bytes!("../../tests/data/6.12-filled/buddyinfo"),
        );
        assert_eq!(of_6_12, zones(8, 71));
    }

    #[test]
    fn larger_orders_count_as_so_many_and_smaller_ones_alone_are_not_known() {
        let ten = "Node 0, zone Normal 9 9 9 9 9 9 9 9 9 9";
        assert_eq!(blocks_of(&format!("{ten}\n"), 1 << 30), None);
        assert_eq!(blocks_of(&format!("{ten} 3\n"), 1 << 30), Some(3));
        assert_eq!(blocks_of(&format!("{ten} 3 2 1\n"), 1 << 30), Some(3 + 4 + 4));
        assert_eq!(
            blocks_of(&format!("{ten} {0} {0}\n", u64::MAX), 1 << 30),
            Some(1 << 20),
            "no more than there are"
        );
    }

    #[test]
    fn memory_that_came_online_after_the_zones_were_read_makes_no_more_than_they_have() {
        assert_eq!(blocks_of("Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 9\n", 8 * 1024), Some(8));
        assert_eq!(
            blocks_of("Node 1, zone Normal 0 0 0 0 0 0 0 0 0 0 9\n", 8 * 1024),
            None,
            "another node"
        );
        assert_eq!(blocks_of("", 8 * 1024), None);
    }

    #[test]
    fn free_pages_are_those_of_all_orders() {
        let mut zones = Vec::new();
        zoneinfo(include_bytes!("../../tests/data/6.12-filled/zoneinfo"), &mut zones)
            .expect("parses");
        let text = include_bytes!("../../tests/data/6.12-filled/buddyinfo");
        let by_zoneinfo: Vec<u64> = zones.iter().map(|zone| zone.free_pages).collect();
        let sum = free_pages(text, &mut zones).expect("parses").expect("the same zones");
        let by_orders: Vec<u64> = zones.iter().map(|zone| zone.free_pages).collect();
        assert_eq!(by_zoneinfo, [464, 10_002, 318, 73_040]);
        // The two texts were read one after the other.
        assert_eq!((by_orders, sum), (vec![465, 10_022, 345, 73_040], 83_872));
    }

    #[test]
    fn a_text_of_other_zones_tells_nothing() {
        let line = "Node 0, zone Normal 1 1 1\n";
        let free = |text: &str, zones: &mut [Zone]| free_pages(text.as_bytes(), zones);
        assert_eq!(free(line, &mut [zone(8)]), Ok(Some(7)));
        assert_eq!(
            free(line, &mut [zone(8), Zone { node: 1, ..zone(8) }]),
            Ok(None),
            "one has gone"
        );
        assert_eq!(free(line, &mut [Zone { node: 1, ..zone(8) }]), Ok(None));
        assert_eq!(
            free(&format!("{line}Node 1, zone Normal 1\n"), &mut [zone(8)]),
            Ok(None),
            "one has come"
        );
        assert_eq!(free("", &mut [zone(8)]), Ok(None));
        assert!(free("Node 0, zone Normal 1 x\n", &mut [zone(8)]).is_err());
        let most = format!("Node 0, zone Normal {0} {0}\n", u64::MAX);
        assert_eq!(free(&most, &mut [zone(8)]), Ok(Some(u64::MAX)));
    }

    #[test]
    fn what_is_no_number_is_named() {
        let error = buddyinfo(b"Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 x\n", &mut [zone(1)])
            .expect_err("x");
        assert_eq!(error.to_string(), "/proc/buddyinfo has a count that is not a number");
        assert!(buddyinfo(b"Node x, zone Normal 0\n", &mut [zone(1)]).is_err());
    }
}
