//! Kernel command line: the user's parameters, and defaults for hotpluggable memory.

use std::borrow::Cow;

use foreshore_devices::memory::zone::{Growth, ZoneSpec};
use thiserror::Error;

use super::KernelShare;

/// COMMAND_LINE_SIZE of x86 without the terminating zero. Linux silently truncates a longer line.
const MAX_BYTES: usize = 2047;
/// Default parameters for a guest with memory that can be plugged and unplugged. Parameters of the
/// user take precedence.
///
/// - Plugged memory can be unplugged again only if it is in ZONE_MOVABLE.
/// - If memory may appear above 4 GiB, x86 reserves 64 MiB of bounce buffers for devices that
///   cannot address it (arch/x86/kernel/pci-dma.c). Foreshore's devices do not need them, because
///   all support 64-bit addresses.
const DEFAULTS: [(&str, &str); 2] =
    [("memhp_default_state", "online_movable"), ("swiotlb", "noforce")];
/// Default parameters for a guest with DIMMs only. Plugged memory may also be used by the kernel,
/// because it is never removed.
const DIMM_DEFAULTS: [(&str, &str); 2] =
    [("memhp_default_state", "online"), ("swiotlb", "noforce")];

/// Parameter that sets the size of ZONE_MOVABLE in boot memory.
const MOVABLE_DRAM: &str = "movablecore";
/// Parameter for the reserve in the zones below ZONE_MOVABLE. Linux accepts sysctls on the command
/// line (fs/proc/proc_sysctl.c, process_sysctl_arg).
const RESERVE_RATIO: &str = "sysctl.vm.lowmem_reserve_ratio";
/// Parameter that sets the size of the zones below ZONE_MOVABLE instead.
const KERNEL_DRAM: &str = "kernelcore";
/// Parameter that makes all memory movable that the firmware marks as hot-pluggable. The parameter
/// has no value.
const MOVABLE_NODE: &str = "movable_node";

/// Memory that can be added after boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pluggable {
    Nothing,
    /// DIMMs, which are never removed.
    Dimms,
    /// Blocks that can be unplugged. If there are DIMMs as well, they are onlined like blocks,
    /// because the guest has one parameter for both.
    Blocks,
}

impl Pluggable {
    /// Returns the kind of memory that `zones` can add.
    pub(crate) fn of(zones: &[ZoneSpec]) -> Self {
        let grows =
            |growth| zones.iter().any(|zone| zone.growth == growth && zone.hotplug_bytes > 0);
        match (grows(Growth::VirtioMem), grows(Growth::Dimms)) {
            (true, _) => Self::Blocks,
            (false, true) => Self::Dimms,
            (false, false) => Self::Nothing,
        }
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum CommandLineError {
    #[error(
        "the command line has {actual_bytes} bytes with the defaults of foreshore, and must have at most {MAX_BYTES}"
    )]
    TooLong { actual_bytes: usize },
    #[error("the command line has the control character {character:?} at byte {at}")]
    ControlCharacter { character: char, at: usize },
}

/// Composes the guest's command line from the user's parameters and the defaults.
pub(super) fn compose(
    user: &str,
    pluggable: Pluggable,
    share: Option<KernelShare>,
) -> Result<String, CommandLineError> {
    // The kernel treats a tab as white space. Any other control character is a mistake, and would
    // truncate the line.
    let control = |c: char| c.is_control() && c != '\t';
    if let Some((at, character)) = user.char_indices().find(|&(_, c)| control(c)) {
        return Err(CommandLineError::ControlCharacter { character, at });
    }
    let (kernel, init) = split_at_init_arguments(user.trim());
    let mut parts = vec![kernel.trim_end().to_owned()];
    let unset =
        defaults(kernel, pluggable, share).into_iter().filter(|(name, _)| !sets(kernel, name));
    parts.extend(unset.map(|(name, value)| match value.contains(' ') {
        true => format!("{name}=\"{value}\""),
        false => format!("{name}={value}"),
    }));
    parts.push(init.to_owned());
    parts.retain(|part| !part.is_empty());
    let line = parts.join(" ");
    if line.len() > MAX_BYTES {
        return Err(CommandLineError::TooLong { actual_bytes: line.len() });
    }
    Ok(line)
}

fn defaults(
    kernel: &str,
    pluggable: Pluggable,
    share: Option<KernelShare>,
) -> Vec<(&'static str, Cow<'static, str>)> {
    let of_all: &[_] = match pluggable {
        Pluggable::Nothing => &[],
        Pluggable::Dimms => &DIMM_DEFAULTS,
        Pluggable::Blocks => &DEFAULTS,
    };
    let mut defaults: Vec<_> =
        of_all.iter().map(|(name, value)| (*name, Cow::from(*value))).collect();
    // The reserve is computed for the default division of DRAM, so it is omitted if the user sets
    // another division.
    let is_divided =
        sets(kernel, MOVABLE_DRAM) || sets(kernel, KERNEL_DRAM) || has(kernel, MOVABLE_NODE);
    if let Some(share) = share.filter(|_| !is_divided) {
        defaults.extend(share.movablecore().map(|size| (MOVABLE_DRAM, size.into())));
        defaults.push((RESERVE_RATIO, share.lowmem_reserve_ratio().into()));
    }
    defaults
}

/// Splits the line before the arguments for init, which start with the word `--`.
fn split_at_init_arguments(line: &str) -> (&str, &str) {
    line.split_at(words(line).find(|(_, word)| *word == "--").map_or(line.len(), |(at, _)| at))
}

/// Words of a line and their offsets, parsed as in Linux (lib/cmdline.c, next_arg): white space in
/// quotation marks is part of a word.
fn words(line: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = line[at..].trim_start();
        let begin = line.len() - rest.len();
        let mut is_quoted = false;
        let end = rest.find(|c: char| {
            is_quoted ^= c == '"';
            c.is_ascii_whitespace() && !is_quoted
        });
        let word = &rest[..end.unwrap_or(rest.len())];
        at = begin + word.len();
        (!word.is_empty()).then_some((begin, word))
    })
}

/// Returns true if the kernel's part of a line sets parameter `name`.
fn sets(kernel: &str, name: &str) -> bool {
    words(kernel).filter_map(|(_, word)| word.split_once('=')).any(|(key, _)| is_called(key, name))
}

/// Returns true if the kernel's part of a line contains `name` as a word without a value.
fn has(kernel: &str, name: &str) -> bool {
    words(kernel).any(|(_, word)| is_called(word.trim_end_matches('"'), name))
}

/// Compares names as Linux does: it accepts `-` for `_`, and `/` for `.` in sysctls. Quotation
/// marks may enclose a whole word.
fn is_called(key: &str, name: &str) -> bool {
    key.strip_prefix('"').unwrap_or(key).replace('-', "_").replace('/', ".") == name
}

#[cfg(test)]
mod tests {
    use foreshore_devices::memory::zone::Tier;

    use super::*;
    use crate::boot::kernel_share::tests::zone;

    const OURS: &str = "memhp_default_state=online_movable swiotlb=noforce";

    #[test]
    fn pluggable_memory_adds_defaults() {
        assert_eq!(
            compose("console=ttyS0", Pluggable::Blocks, None).unwrap(),
            format!("console=ttyS0 {OURS}")
        );
        assert_eq!(compose("", Pluggable::Blocks, None).unwrap(), OURS);
        // Words that resemble the parameter, but do not set it.
        for user in ["xmemhp_default_state=offline", "init=/swiotlb", "swiotlb"] {
            assert_eq!(compose(user, Pluggable::Blocks, None).unwrap(), format!("{user} {OURS}"));
        }
    }

    #[test]
    fn dimms_are_onlined_for_the_kernel() {
        assert_eq!(
            compose("", Pluggable::Dimms, None).unwrap(),
            "memhp_default_state=online swiotlb=noforce"
        );
    }

    #[test]
    fn parameters_of_the_user_take_precedence() {
        let line = compose("memhp_default_state=offline quiet", Pluggable::Blocks, None).unwrap();
        assert_eq!(line, "memhp_default_state=offline quiet swiotlb=noforce");
        let line =
            compose("memhp-default-state=online_kernel swiotlb=4096", Pluggable::Blocks, None)
                .unwrap();
        assert_eq!(line, "memhp-default-state=online_kernel swiotlb=4096");
    }

    #[test]
    fn pluggable_memory_follows_zones() {
        let [dram, more_dram, pm] =
            [zone(Tier::Dram, 1, 0), zone(Tier::Dram, 1, 1), zone(Tier::Pm, 0, 1)];
        let dimms = ZoneSpec { growth: Growth::Dimms, ..more_dram.clone() };
        for (zones, pluggable) in [
            (vec![], Pluggable::Nothing),
            (vec![dram.clone()], Pluggable::Nothing),
            (vec![dram.clone(), pm.clone()], Pluggable::Blocks),
            (vec![more_dram.clone()], Pluggable::Blocks),
            (vec![dimms.clone()], Pluggable::Dimms),
            // Memory in the PM zone can be unplugged.
            (vec![dimms, pm.clone()], Pluggable::Blocks),
            // Several nodes, but only one of them can grow.
            (vec![dram, pm, more_dram], Pluggable::Blocks),
        ] {
            assert_eq!(Pluggable::of(&zones), pluggable, "{zones:?}");
        }
    }

    #[test]
    fn boot_memory_is_divided_for_pm_unless_the_user_divides_it() {
        const SHARE: &str = r#"movablecore=64M sysctl.vm.lowmem_reserve_ratio="256 1 32 0 0""#;
        let zones = [zone(Tier::Dram, 512, 0), zone(Tier::Pm, 0, 1536)];
        let share = KernelShare::of(&zones).expect("the VM has PM");
        let alone = |user: &str| compose(user, Pluggable::Blocks, Some(share)).unwrap();
        assert_eq!(alone("quiet -- single"), format!("quiet {OURS} {SHARE} -- single"));
        assert_eq!(compose("", Pluggable::Blocks, None).unwrap(), OURS);
        for user in [
            "movablecore=0",
            "kernelcore=384M",
            "movable_node",
            "movable-node",
            "\"kernelcore=50%\"",
        ] {
            assert_eq!(alone(user), format!("{user} {OURS}"), "the parameters of the user stay");
        }
        // Words that resemble the parameters, but do not set them.
        for user in
            ["movablecore", "xmovablecore=1", "init=/kernelcore=1", "movable_nodes", "kernelcore"]
        {
            assert_eq!(alone(user), format!("{user} {OURS} {SHARE}"));
        }
        for text in ["kernelcore=1", "movable_node", "a -- b", "--"] {
            let user = format!("foreshore.run=\"echo {text} x\" quiet");
            assert_eq!(
                alone(&user),
                format!("{user} {OURS} {SHARE}"),
                "in the midst of another word"
            );
        }
        assert_eq!(alone("-- movablecore=1"), format!("{OURS} {SHARE} -- movablecore=1"));
        let dram = KernelShare::of(&[zone(Tier::Dram, 512, 1024)]);
        let line = compose("quiet", Pluggable::Blocks, dram).unwrap();
        assert_eq!(line, format!(r#"quiet {OURS} sysctl.vm.lowmem_reserve_ratio="256 21 32 0 0""#));
    }

    #[test]
    fn words_are_split_as_in_linux() {
        let taken = |line| words(line).map(|(_, word)| word).collect::<Vec<_>>();
        assert_eq!(taken("  a\tb=\"c d\"e  "), ["a", "b=\"c d\"e"]);
        assert_eq!(taken("a=\"b c"), ["a=\"b c"], "an open quotation extends to the end");
        assert_eq!(taken(" \t "), [""; 0]);
        assert_eq!(
            split_at_init_arguments("a \"b -- c\" -- d -- e"),
            ("a \"b -- c\" ", "-- d -- e")
        );
    }

    #[test]
    fn no_defaults_without_pluggable_memory() {
        assert_eq!(
            compose(" console=hvc0 root=/dev/vda ", Pluggable::Nothing, None).unwrap(),
            "console=hvc0 root=/dev/vda"
        );
        assert_eq!(
            compose("quiet -- single", Pluggable::Nothing, None).unwrap(),
            "quiet -- single"
        );
        assert_eq!(compose("", Pluggable::Nothing, None).unwrap(), "");
    }

    #[test]
    fn arguments_of_init_stay_last() {
        assert_eq!(
            compose("quiet -- single", Pluggable::Blocks, None).unwrap(),
            format!("quiet {OURS} -- single")
        );
        assert_eq!(
            compose("-- single", Pluggable::Blocks, None).unwrap(),
            format!("{OURS} -- single")
        );
        assert_eq!(
            compose("quiet --", Pluggable::Blocks, None).unwrap(),
            format!("quiet {OURS} --")
        );
        let to_init = compose("quiet -- swiotlb=1", Pluggable::Blocks, None).unwrap();
        assert_eq!(to_init, format!("quiet {OURS} -- swiotlb=1"));
    }

    #[test]
    fn limit_includes_defaults() {
        let user = "x".repeat(MAX_BYTES);
        assert_eq!(compose(&user, Pluggable::Nothing, None).unwrap().len(), MAX_BYTES);
        let actual_bytes = MAX_BYTES + 1 + OURS.len();
        assert_eq!(
            compose(&user, Pluggable::Blocks, None),
            Err(CommandLineError::TooLong { actual_bytes })
        );
    }

    #[test]
    fn control_characters_are_refused() {
        let refused = compose("quiet\0console=ttyS0", Pluggable::Nothing, None);
        assert_eq!(refused, Err(CommandLineError::ControlCharacter { character: '\0', at: 5 }));
        assert!(compose("a\nb", Pluggable::Blocks, None).is_err());
        assert!(compose("a\tb", Pluggable::Blocks, None).is_ok());
    }
}
