//! Parser for /proc/vmstat.

use foreshore_proto::Counters;

use super::{ParseError, lines, required};

/// Parses event counters. Missing counters are zero.
pub(crate) fn vmstat(text: &[u8]) -> Result<Counters, ParseError> {
    let mut counters = Counters::default();
    for line in lines(text) {
        // Only a dozen of about two hundred lines are needed, so the first letters are checked
        // first.
        let is_ours = matches!(
            line,
            [b'p', b's' | b'g', ..]
                | [b'w', ..]
                | [b'a', b'l', ..]
                | [b'o', b'o', ..]
                | [b'n', b'u', ..]
        );
        if !is_ours {
            continue;
        }
        let Some(space) = line.iter().position(|&byte| byte == b' ') else { continue };
        let (name, value) = (&line[..space], &line[space + 1..]);
        let Some((field, counter)) = counter(&mut counters, name) else { continue };
        let value = required(Some(value), "/proc/vmstat", field)?;
        *counter = counter.saturating_add(value);
        // The name gives the highest zone that the allocation could use. All zones except
        // ZONE_MOVABLE (and ZONE_DEVICE) serve the kernel.
        if matches!(name, b"allocstall_dma" | b"allocstall_dma32" | b"allocstall_normal") {
            counters.allocstall_kernel = counters.allocstall_kernel.saturating_add(value);
        }
    }
    Ok(counters)
}

/// Returns the field for the counter `name`. Several counters may be added up in one field.
fn counter<'a>(counters: &'a mut Counters, name: &[u8]) -> Option<(&'static str, &'a mut u64)> {
    macro_rules! fields {
        ($($field:ident)+) => {
            $(if name == stringify!($field).as_bytes() {
                return Some((stringify!($field), &mut counters.$field));
            })+
        };
    }
    fields! {
        pswpin pswpout pgmajfault workingset_refault_anon workingset_refault_file pgscan_kswapd
        pgscan_direct pgsteal_kswapd pgsteal_direct numa_miss numa_other oom_kill
    }
    // Linux has one counter per zone.
    name.starts_with(b"allocstall_").then_some(("allocstall", &mut counters.allocstall))
}

#[cfg(test)]
mod tests {
    use super::super::tests::text_of;
    use super::*;

    #[test]
    fn every_counter_is_parsed_and_stalls_of_zones_are_summed() {
        let text =
            b"nr_free_pages 9\npswpin 1\npswpout 2\nallocstall_dma 3\nallocstall_normal 4\nallocstall_movable 5\npgmajfault 5\n\
            pgscan_kswapd 6\npgscan_direct 7\npgscan_direct_throttle 99\npgsteal_kswapd 8\npgsteal_direct 9\n\
            workingset_refault_anon 10\nworkingset_refault_file 11\noom_kill 12\n\
            numa_hit 99\nnuma_miss 13\nnuma_other 14\nnuma_pages_migrated 99\n";
        let expected = Counters {
            pswpin: 1,
            pswpout: 2,
            pgmajfault: 5,
            workingset_refault_anon: 10,
            workingset_refault_file: 11,
            pgscan_kswapd: 6,
            pgscan_direct: 7,
            pgsteal_kswapd: 8,
            pgsteal_direct: 9,
            allocstall: 12,
            allocstall_kernel: 7,
            numa_miss: 13,
            numa_other: 14,
            oom_kill: 12,
        };
        assert_eq!(vmstat(text), Ok(expected));
    }

    #[test]
    fn guests_that_swapped() {
        for guest in ["6.1-swapped", "6.12-swapped"] {
            let swapped = vmstat(&text_of(guest, "vmstat")).expect("parses");
            assert!(swapped.pswpout > 0 && swapped.pgscan_kswapd > 0 && swapped.pgsteal_kswapd > 0);
        }
    }

    #[test]
    fn invalid_counter_is_named() {
        let wrong = vmstat(b"pswpout -3\n").expect_err("negative");
        assert_eq!(wrong.to_string(), "/proc/vmstat has a pswpout that is not a number");
        assert_eq!(vmstat(b"pswpout\n\n"), Ok(Counters::default()));
    }
}
