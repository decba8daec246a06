//! Parser for /proc/buddyinfo.

use foreshore_proto::{LARGEST_BLOCK_BYTES, Zone};

use super::zoneinfo::zone_of;
use super::{ParseError, lines, required, words};

const FILE: &str = "/proc/buddyinfo";

/// Order of the blocks to count: 1024 pages of 4 KiB.
const LARGEST_ORDER: usize = 10;

/// Sets the number of free blocks of the largest order in each of `zones`. If the kernel's
/// allocator has no blocks of that order, the number is `None`.
pub(crate) fn buddyinfo(text: &[u8], zones: &mut [Zone]) -> Result<(), ParseError> {
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
        // The zones were read earlier. Without this limit, memory that has come online since then
        // could make a report invalid.
        let bound = zone.managed_pages / (LARGEST_BLOCK_BYTES / 4096);
        zone.largest_free_blocks =
            free_blocks(line, LARGEST_ORDER)?.map(|blocks| blocks.min(bound));
    }
    Ok(())
}

/// Sets the number of free pages in each of `zones`, and returns their sum. Returns `None` unless
/// the text contains exactly these zones.
pub(crate) fn free_pages(text: &[u8], zones: &mut [Zone]) -> Result<Option<u64>, ParseError> {
    let (mut count, mut sum) = (0, 0u64);
    for line in lines(text).filter(|line| line.starts_with(b"Node ")) {
        let (node, kind) = zone_of(line, FILE)?;
        let Some(zone) = zones.iter_mut().find(|zone| (zone.node, zone.kind) == (node, kind))
        else {
            return Ok(None);
        };
        zone.free_pages = free_blocks(line, 0)?.unwrap_or(0);
        count += 1;
        sum = sum.saturating_add(zone.free_pages);
    }
    Ok((count == zones.len()).then_some(sum))
}

/// Returns the sum of all columns from `order` on, in blocks of that order. A line such as `Node 0,
/// zone DMA32` has a column for each order. Returns `None` if the line has no such columns.
fn free_blocks(line: &[u8], order: usize) -> Result<Option<u64>, ParseError> {
    let mut sum = None;
    for (above, word) in words(line).skip(4 + order).enumerate() {
        let count = required(Some(word), FILE, "count")?;
        let blocks = count.saturating_mul(1u64.checked_shl(above as u32).unwrap_or(u64::MAX));
        sum = Some(blocks.saturating_add(sum.unwrap_or(0)));
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use foreshore_proto::ZoneKind;

    use super::super::tests::text_of;
    use super::super::zoneinfo;
    use super::*;

    fn parse(guest: &str) -> Vec<(u32, ZoneKind, Option<u64>)> {
        let [zone_text, text] = ["zoneinfo", "buddyinfo"].map(|name| text_of(guest, name));
        let mut zones = Vec::new();
        zoneinfo(&zone_text, &mut zones).expect("parses");
        buddyinfo(&text, &mut zones).expect("parses");
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
    fn guests_with_memory_plugged_into_its_own_node() {
        let zones = |dma32, pm| {
            [
                (0, ZoneKind::Dma, Some(0)),
                (0, ZoneKind::Dma32, Some(dma32)),
                (0, ZoneKind::Movable, Some(0)),
                (1, ZoneKind::Movable, Some(pm)),
            ]
        };
        assert_eq!(parse("6.1-filled"), zones(7, 73));
        assert_eq!(parse("6.12-filled"), zones(8, 71));
    }

    #[test]
    fn larger_orders_are_converted_and_missing_ones_are_unknown() {
        for (larger, blocks) in [
            ("", None),
            (" 3", Some(3)),
            (" 3 2 1", Some(3 + 4 + 4)),
            // The number is limited to the blocks that fit into the zone.
            (" 18446744073709551615 18446744073709551615", Some(1 << 20)),
        ] {
            let text = format!("Node 0, zone Normal 9 9 9 9 9 9 9 9 9 9{larger}\n");
            assert_eq!(blocks_of(&text, 1 << 30), blocks, "{larger}");
        }
    }

    #[test]
    fn blocks_that_came_online_later_do_not_exceed_the_zone() {
        let of_node =
            |node| blocks_of(&format!("Node {node}, zone Normal 0 0 0 0 0 0 0 0 0 0 9\n"), 8 << 10);
        assert_eq!([of_node(0), of_node(1)], [Some(8), None]);
        assert_eq!(blocks_of("", 8 << 10), None);
    }

    #[test]
    fn free_pages_are_those_of_all_orders() {
        let mut zones = Vec::new();
        zoneinfo(&text_of("6.12-filled", "zoneinfo"), &mut zones).expect("parses");
        let by_zoneinfo: Vec<u64> = zones.iter().map(|zone| zone.free_pages).collect();
        let sum = free_pages(&text_of("6.12-filled", "buddyinfo"), &mut zones);
        let sum = sum.expect("parses").expect("the same zones");
        let by_orders: Vec<u64> = zones.iter().map(|zone| zone.free_pages).collect();
        assert_eq!(by_zoneinfo, [464, 10_002, 318, 73_040]);
        // The two texts were read at different times.
        assert_eq!((by_orders, sum), (vec![465, 10_022, 345, 73_040], 83_872));
    }

    #[test]
    fn text_of_other_zones_is_ignored() {
        let line = "Node 0, zone Normal 1 1 1\n";
        let one_more = format!("{line}Node 1, zone Normal 1\n");
        let most = format!("Node 0, zone Normal {0} {0}\n", u64::MAX);
        let free = |text: &str, nodes: &[u32]| {
            let zone = |node: &u32| Zone { node: *node, ..zone(8) };
            free_pages(text.as_bytes(), &mut nodes.iter().map(zone).collect::<Vec<_>>())
        };
        for (text, nodes, pages) in [
            (line, &[0][..], Some(7)),
            // One zone is missing, one is different, and one is new.
            (line, &[0, 1], None),
            (line, &[1], None),
            (&one_more, &[0], None),
            ("", &[0], None),
            (&most, &[0], Some(u64::MAX)),
        ] {
            assert_eq!(free(text, nodes), Ok(pages), "{text} {nodes:?}");
        }
        assert!(free("Node 0, zone Normal 1 x\n", &[0]).is_err());
    }

    #[test]
    fn invalid_number_is_named() {
        let error = buddyinfo(b"Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 x\n", &mut [zone(1)])
            .expect_err("x");
        assert_eq!(error.to_string(), "/proc/buddyinfo has a count that is not a number");
        assert!(buddyinfo(b"Node x, zone Normal 0\n", &mut [zone(1)]).is_err());
    }
}
