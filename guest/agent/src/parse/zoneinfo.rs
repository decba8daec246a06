//! Parser for /proc/zoneinfo.

use foreshore_proto::{Zone, ZoneKind};

use super::{ParseError, lines, required, words};

const FILE: &str = "/proc/zoneinfo";

/// Replaces `zones` with all zones that have memory. Returns the number of locked and compressed
/// pages in kernel zones.
pub(crate) fn zoneinfo(text: &[u8], zones: &mut Vec<Zone>) -> Result<u64, ParseError> {
    zones.clear();
    let mut other_user_pages = 0;
    let mut zone: Option<Zone> = None;
    for line in lines(text) {
        if line.starts_with(b"Node ") {
            finish(zone.take(), zones);
            let (node, kind) = zone_of(line, FILE)?;
            zone = Some(Zone { node, kind, ..Zone::default() });
            continue;
        }
        let Some(current) = zone.as_mut() else { continue };
        // Sizes are indented by eight columns or follow `pages`. Counters of a zone are indented by
        // six columns. Most other lines are about single CPUs.
        let rest = match line {
            [b' ', b' ', b'p', b'a', rest @ ..] => rest.strip_prefix(b"ges "),
            [b' ', b' ', b' ', b' ', b' ', b' ', b'n', rest @ ..] => {
                add_user_pages(rest, current, &mut other_user_pages)?;
                continue;
            }
            _ => line
                .strip_prefix(b"        ")
                .filter(|rest| matches!(rest, [b'm' | b'l' | b'h' | b'p', ..])),
        };
        let Some(rest) = rest else { continue };
        let mut words = words(rest);
        let (place, field): (&mut u64, _) = match words.next() {
            Some(b"free") => (&mut current.free_pages, "free"),
            Some(b"min") => (&mut current.min_pages, "min"),
            Some(b"low") => (&mut current.low_pages, "low"),
            Some(b"high") => (&mut current.high_pages, "high"),
            Some(b"managed") => (&mut current.managed_pages, "managed"),
            Some(b"protection:") => {
                current.protected_pages = Some(most_protection(words)?);
                continue;
            }
            _ => continue,
        };
        *place = required(words.next(), FILE, field)?;
    }
    finish(zone, zones);
    if zones.is_empty() {
        return Err(ParseError::Missing { file: FILE, field: "zone with memory" });
    }
    Ok(other_user_pages)
}

/// Adds the value of a line such as `nr_zone_active_file 5`, whose first letter the caller has
/// removed.
///
/// [`Zone::user_pages`] excludes locked pages (`nr_zone_unevictable`), because Linux cannot swap
/// them out, and compressed data of zram and zswap (`nr_zspages`). In a kernel zone, both are added
/// to `other_user_pages`.
fn add_user_pages(
    rest: &[u8],
    zone: &mut Zone,
    other_user_pages: &mut u64,
) -> Result<(), ParseError> {
    let mut words = words(rest);
    let sum = match words.next() {
        Some(
            b"r_zone_inactive_anon"
            | b"r_zone_active_anon"
            | b"r_zone_inactive_file"
            | b"r_zone_active_file",
        ) => zone.user_pages.get_or_insert(0),
        Some(b"r_zone_unevictable" | b"r_zspages") if zone.serves_kernel() => other_user_pages,
        _ => return Ok(()),
    };
    *sum = sum.saturating_add(required(words.next(), FILE, "user pages of a zone")?);
    Ok(())
}

/// Returns the largest number in a list such as `(0, 203, 203, 259, 259)`. Each number applies to
/// allocations whose highest zone has that index, so the largest one applies to user pages
/// (mm/page_alloc.c, setup_per_zone_lowmem_reserve).
fn most_protection<'a>(words: impl Iterator<Item = &'a [u8]>) -> Result<u64, ParseError> {
    let mut most = 0;
    for word in words {
        let word = word.strip_prefix(b"(").unwrap_or(word);
        let word = word.strip_suffix(b",").or(word.strip_suffix(b")")).unwrap_or(word);
        most = most.max(required(Some(word), FILE, "protection")?);
    }
    Ok(most)
}

/// Parses `Node 0, zone    DMA32`, the start of a line in `file`.
pub(super) fn zone_of(line: &[u8], file: &'static str) -> Result<(u32, ZoneKind), ParseError> {
    let mut words = words(line).skip(1);
    let node = required(words.next().and_then(|word| word.strip_suffix(b",")), file, "node")?;
    let node = u32::try_from(node).map_err(|_| ParseError::NotANumber { file, field: "node" })?;
    let kind = match words.nth(1) {
        Some(b"DMA") => ZoneKind::Dma,
        Some(b"DMA32") => ZoneKind::Dma32,
        Some(b"Normal") => ZoneKind::Normal,
        Some(b"Movable") => ZoneKind::Movable,
        Some(b"Device") => ZoneKind::Device,
        _ => ZoneKind::Other,
    };
    Ok((node, kind))
}

fn finish(zone: Option<Zone>, zones: &mut Vec<Zone>) {
    zones.extend(zone.filter(|zone| zone.managed_pages > 0).map(|zone| Zone {
        protected_pages: zone.protected_pages.map(|pages| pages.min(zone.managed_pages)),
        ..zone
    }));
}

#[cfg(test)]
mod tests {
    use super::super::tests::text_of;
    use super::*;

    fn parse(text: &[u8]) -> Vec<Zone> {
        let mut zones = vec![Zone::default(); 3];
        zoneinfo(text, &mut zones).expect("parses");
        zones
    }

    #[test]
    fn guest_of_6_12_with_memory_plugged_into_its_own_node() {
        let zones = parse(&text_of("6.12-filled", "zoneinfo"));
        let dma = Zone {
            kind: ZoneKind::Dma,
            free_pages: 464,
            min_pages: 25,
            low_pages: 31,
            high_pages: 37,
            managed_pages: 3840,
            user_pages: Some(3328),
            protected_pages: Some(451),
            ..Zone::default()
        };
        let dma32 = Zone {
            kind: ZoneKind::Dma32,
            free_pages: 10_002,
            min_pages: 559,
            low_pages: 698,
            high_pages: 837,
            managed_pages: 82_837,
            user_pages: Some(63_763),
            protected_pages: Some(8192),
            ..Zone::default()
        };
        assert_eq!(zones[..2], [dma, dma32]);
        assert_eq!(zones.len(), 4, "zones without memory are left out");
        assert_eq!((zones[3].node, zones[3].kind), (1, ZoneKind::Movable));
        assert_eq!(zones[3].managed_pages, 131_072, "512 MiB");
    }

    #[test]
    fn a_guest_of_6_1() {
        let zones = parse(&text_of("6.1-filled", "zoneinfo"));
        let kinds: Vec<_> = zones.iter().map(|zone| zone.kind).collect();
        assert_eq!(kinds, [ZoneKind::Dma, ZoneKind::Dma32, ZoneKind::Movable, ZoneKind::Movable]);
        for zone in zones {
            assert!([zone.min_pages, zone.low_pages, zone.high_pages].is_sorted(), "{zone:?}");
            assert!(zone.free_pages > 0 && zone.high_pages > 0, "{zone:?}");
        }
    }

    #[test]
    fn user_pages_are_anonymous_or_of_files_and_locked_ones_are_separate() {
        let mut zones = Vec::new();
        let of_6_1 = text_of("6.1-filled", "zoneinfo");
        assert_eq!(zoneinfo(&of_6_1, &mut zones).expect("parses"), 511);
        let text = String::from_utf8(text_of("6.12-filled", "zoneinfo")).expect("ASCII");
        // 1,000 pages in all zones. Locked and compressed pages in ZONE_DMA and in movable zones
        // are not counted.
        for (counter, other_user_pages, more_user_pages) in [
            ("nr_none 0", 511, 0),
            ("nr_zspages   0", 1_511, 0),
            ("nr_zone_unevictable 0", 511, 0),
            ("nr_zone_inactive_anon 0", 511, 1_000),
            ("nr_zone_inactive_file 0", 511, 1_000),
            ("nr_zone_active_file 0", 511, 1_000),
        ] {
            let text = text.replace(counter, &counter.replace('0', "1000"));
            let other = zoneinfo(text.as_bytes(), &mut zones).expect("parses");
            assert_eq!(other, other_user_pages, "{counter}");
            let user_pages = [3_328, 63_763, 32_275, 57_651].map(|pages| pages + more_user_pages);
            assert!(zones.iter().map(|zone| zone.user_pages).eq(user_pages.map(Some)), "{counter}");
        }
    }

    #[test]
    fn missing_field_or_invalid_number_is_named() {
        let mut zones = Vec::new();
        assert!(zoneinfo(b"", &mut zones).is_err());
        assert!(zoneinfo(b"Node x, zone DMA\n", &mut zones).is_err());
        assert!(zoneinfo(b"Node 0, zone DMA\n  pages free  none\n", &mut zones).is_err());
        assert!(zoneinfo(b"Node 0, zone DMA\n        protection: (0, x)\n", &mut zones).is_err());
    }

    #[test]
    fn protection_from_user_pages_is_at_most_the_zone() {
        let protected = |numbers: &str| {
            let text = format!(
                "Node 0, zone DMA32\n        managed  500\n        protection: {numbers}\n"
            );
            parse(text.as_bytes())[0].protected_pages
        };
        assert_eq!(protected("(0, 0, 203, 259, 259)"), Some(259));
        assert_eq!(protected("(0, 0, 0, 1000, 1000)"), Some(500));
        assert_eq!(protected(""), Some(0));
        assert_eq!(parse(b"Node 0, zone DMA32\n        managed  500\n")[0].protected_pages, None);
    }
}
