//! The kernel command line: the user's, and what a VM of this kind needs.

use thiserror::Error;

/// x86's COMMAND_LINE_SIZE less the terminating zero; Linux cuts a longer line off without a word.
const MAX_BYTES: usize = 2047;
/// What a guest is told whose memory can be plugged, unless the user says something else.
///
/// - Plugged memory can be unplugged again only if it is in ZONE_MOVABLE.
/// - Memory that may come above 4 GiB makes x86 reserve 64 MiB of bounce buffers for devices that cannot reach it
///   (arch/x86/kernel/pci-dma.c). There are none: every device here takes 64-bit addresses.
const DEFAULTS: [(&str, &str); 2] = [("memhp_default_state", "online_movable"), ("swiotlb", "noforce")];

/// Why a command line is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CommandLineError {
    /// Longer than Linux takes.
    #[error("the command line has {actual_bytes} bytes with what is added to it, the limit is {MAX_BYTES}")]
    TooLong {
        /// Its length.
        actual_bytes: usize,
    },
    /// A zero byte or a line break.
    #[error("the command line has the control character {character:?} at byte {at}")]
    ControlCharacter {
        /// The character.
        character: char,
        /// Its position.
        at: usize,
    },
}

/// The guest's command line: `user`'s, with [`DEFAULTS`] where memory can be plugged.
pub fn compose(user: &str, memory_is_pluggable: bool) -> Result<String, CommandLineError> {
    // A tab is white space to the kernel; any other control character is a mistake that would cut the line.
    let control = |c: char| c.is_control() && c != '\t';
    if let Some((at, character)) = user.char_indices().find(|&(_, c)| control(c)) {
        return Err(CommandLineError::ControlCharacter { character, at });
    }
    let defaults: &[(&str, &str)] = if memory_is_pluggable { &DEFAULTS } else { &[] };
    // Kernel parameters end at " -- "; what follows it is init's.
    let (kernel, init) = split_at_init_arguments(user.trim());
    let mut words = vec![kernel.trim_end().to_owned()];
    let unset = defaults.iter().filter(|(name, _)| !sets(kernel, name));
    words.extend(unset.map(|(name, value)| format!("{name}={value}")));
    words.push(init.to_owned());
    words.retain(|word| !word.is_empty());
    let line = words.join(" ");
    if line.len() > MAX_BYTES {
        return Err(CommandLineError::TooLong { actual_bytes: line.len() });
    }
    Ok(line)
}

fn split_at_init_arguments(line: &str) -> (&str, &str) {
    if line.starts_with("-- ") || line == "--" {
        return ("", line);
    }
    match line.find(" -- ") {
        Some(at) => (&line[..at], &line[at + 1..]),
        None => line.strip_suffix(" --").map_or((line, ""), |kernel| (kernel, "--")),
    }
}

/// Whether the kernel's part of a line sets parameter `name`. Linux takes `-` for `_` in names.
fn sets(kernel: &str, name: &str) -> bool {
    kernel
        .split_ascii_whitespace()
        .filter_map(|word| word.split_once('='))
        .any(|(key, _)| key.replace('-', "_") == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "memhp_default_state=online_movable swiotlb=noforce";

    #[test]
    fn a_guest_with_pluggable_memory_is_told_how_to_treat_it() {
        assert_eq!(compose("console=ttyS0", true).unwrap(), format!("console=ttyS0 {OURS}"));
        assert_eq!(compose("", true).unwrap(), OURS);
        // Not the parameter, only words that look like it.
        for user in ["xmemhp_default_state=offline", "init=/swiotlb", "swiotlb"] {
            assert_eq!(compose(user, true).unwrap(), format!("{user} {OURS}"));
        }
    }

    #[test]
    fn what_the_user_sets_stays() {
        let line = compose("memhp_default_state=offline quiet", true).unwrap();
        assert_eq!(line, "memhp_default_state=offline quiet swiotlb=noforce");
        let line = compose("memhp-default-state=online_kernel swiotlb=4096", true).unwrap();
        assert_eq!(line, "memhp-default-state=online_kernel swiotlb=4096");
    }

    #[test]
    fn nothing_is_added_where_nothing_can_be_plugged() {
        assert_eq!(compose(" console=hvc0 root=/dev/vda ", false).unwrap(), "console=hvc0 root=/dev/vda");
        assert_eq!(compose("quiet -- single", false).unwrap(), "quiet -- single");
        assert_eq!(compose("", false).unwrap(), "");
    }

    #[test]
    fn what_belongs_to_init_stays_behind_the_dashes() {
        assert_eq!(compose("quiet -- single", true).unwrap(), format!("quiet {OURS} -- single"));
        assert_eq!(compose("-- single", true).unwrap(), format!("{OURS} -- single"));
        assert_eq!(compose("quiet --", true).unwrap(), format!("quiet {OURS} --"));
        let to_init = compose("quiet -- swiotlb=1", true).unwrap();
        assert_eq!(to_init, format!("quiet {OURS} -- swiotlb=1"));
    }

    #[test]
    fn the_limit_counts_what_is_added() {
        let user = "x".repeat(MAX_BYTES);
        assert_eq!(compose(&user, false).unwrap().len(), MAX_BYTES);
        let actual_bytes = MAX_BYTES + 1 + OURS.len();
        assert_eq!(compose(&user, true), Err(CommandLineError::TooLong { actual_bytes }));
    }

    #[test]
    fn control_characters_are_refused() {
        let refused = compose("quiet\0console=ttyS0", false);
        assert_eq!(refused, Err(CommandLineError::ControlCharacter { character: '\0', at: 5 }));
        assert!(compose("a\nb", true).is_err());
        assert!(compose("a\tb", true).is_ok());
    }
}
