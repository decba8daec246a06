//! Resident size of guest memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// Returns the resident bytes of each zone. A zone is given as host-virtual ranges (address,
/// length). The source is /proc/self/smaps, which counts pages in this process's page tables, both
/// DRAM and mapped PM.
///
/// The kernel walks page tables for this, so one pass covers all zones. Call this at most about
/// once a second. A mapping that overlaps a range is counted completely, because no mapping with
/// pages extends beyond its reservation.
pub fn resident_bytes<R: AsRef<[(u64, u64)]>>(zones: &[R]) -> io::Result<Vec<u64>> {
    resident_bytes_in(BufReader::with_capacity(1 << 16, File::open("/proc/self/smaps")?), zones)
}

/// `Rss` does not include reserved huge pages.
const RESIDENT: [&str; 3] = ["Rss:", "Private_Hugetlb:", "Shared_Hugetlb:"];

fn resident_bytes_in<R: AsRef<[(u64, u64)]>>(
    smaps: impl BufRead,
    zones: &[R],
) -> io::Result<Vec<u64>> {
    let mut totals = vec![0; zones.len()];
    // Index of the zone that contains the current mapping.
    let mut inside = None;
    for line in smaps.lines() {
        let line = line?;
        if let Some((start, end)) = mapping(&line) {
            let meets = |&(addr, len): &(u64, u64)| addr < end && start < addr + len;
            inside = zones.iter().position(|zone| zone.as_ref().iter().any(meets));
        } else if let Some(zone) = inside
            && let Some(rest) = RESIDENT.iter().find_map(|name| line.strip_prefix(name))
        {
            let kib = rest.trim().trim_end_matches(" kB").parse::<u64>();
            totals[zone] +=
                kib.map_err(|err| io::Error::new(io::ErrorKind::InvalidData, err))? * 1024;
        }
    }
    Ok(totals)
}

/// Start and end of a mapping, if `line` is the first line of its entry: `7f00-7f10 rw-p ...`.
fn mapping(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0 
Size:                  8 kB
Rss:                   4 kB
Pss:                   4 kB
VmFlags: rd wr mr mw me ac sd 
5000-9000 rw-s 00000000 00:13 7 /dev/shm/pool
Rss:                  16 kB
400000-800000 rw-s 00000000 00:13 8 /memfd:foreshore-dram (deleted)
Rss:                   0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    2048 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
Rss:                   0 kB
";

    #[test]
    fn only_mappings_in_the_ranges_are_counted() {
        let resident =
            |ranges: &[(u64, u64)]| resident_bytes_in(SMAPS.as_bytes(), &[ranges]).unwrap();
        assert_eq!(resident(&[(0x1000, 0x2000)]), [4096]);
        assert_eq!(resident(&[(0x5000, 0x4000)]), [16384]);
        assert_eq!(resident(&[(0x1000, 0x2000), (0x5000, 0x4000)]), [20480]);
        assert_eq!(resident(&[(0x3000, 0x2000)]), [0]);
        assert_eq!(resident(&[(0x40_0000, 0x40_0000)]), [2 << 20]);
        assert_eq!(resident(&[]), [0]);
    }

    #[test]
    fn one_pass_separates_zones() {
        let zones = [vec![(0x5000, 0x4000)], vec![], vec![(0x1000, 0x2000), (0x3000, 0x2000)]];
        assert_eq!(resident_bytes_in(SMAPS.as_bytes(), &zones).unwrap(), [16384, 0, 4096]);
    }
}
