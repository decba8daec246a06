//! The kernel command line: the user's, and what a VM of this kind needs.

use thiserror::Error;

/// x86's COMMAND_LINE_SIZE less the terminating zero; Linux cuts a longer line off without a word.
const MAX_BYTES: usize = 2047;
/// Plugged memory can be unplugged again only if it is in ZONE_MOVABLE.
const ONLINE_MOVABLE: &str = "memhp_default_state=online_movable";

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

/// The guest's command line: `user`'s, with the default state of plugged memory unless `user` says one.
pub fn compose(user: &str, memory_is_pluggable: bool) -> Result<String, CommandLineError> {
    // A tab is white space to the kernel; any other control character is a mistake that would cut the line.
    let control = |c: char| c.is_control() && c != '\t';
    if let Some((at, character)) = user.char_indices().find(|&(_, c)| control(c)) {
        return Err(CommandLineError::ControlCharacter { character, at });
    }
    let mut words: Vec<&str> = vec![user.trim()];
    if memory_is_pluggable && !sets(user, "memhp_default_state") {
        // Kernel parameters end at " -- "; what follows it is init's.
        let (kernel, init) = split_at_init_arguments(words[0]);
        words = vec![kernel.trim_end(), ONLINE_MOVABLE, init];
    }
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

/// Whether `line` sets the kernel parameter `name`. Linux takes `-` for `_` in names.
fn sets(line: &str, name: &str) -> bool {
    let (kernel, _) = split_at_init_arguments(line.trim());
    kernel
        .split_ascii_whitespace()
        .filter_map(|word| word.split_once('='))
        .any(|(key, _)| key.replace('-', "_") == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugged_memory_is_onlined_movable_unless_the_user_says_otherwise() {
        assert_eq!(compose("console=ttyS0", true).unwrap(), format!("console=ttyS0 {ONLINE_MOVABLE}"));
        assert_eq!(compose("", true).unwrap(), ONLINE_MOVABLE);
        for user in ["memhp_default_state=offline quiet", "quiet memhp-default-state=online_kernel"] {
            assert_eq!(compose(user, true).unwrap(), user);
        }
        // Not the parameter, only words that look like it.
        let line = compose("xmemhp_default_state=offline", true).unwrap();
        assert!(line.ends_with(ONLINE_MOVABLE));
    }

    #[test]
    fn nothing_is_added_where_nothing_can_be_plugged() {
        assert_eq!(
            compose(" console=hvc0 root=/dev/vda \n".trim_end(), false).unwrap(),
            "console=hvc0 root=/dev/vda"
        );
        assert_eq!(compose("", false).unwrap(), "");
    }

    #[test]
    fn what_belongs_to_init_stays_behind_the_dashes() {
        assert_eq!(compose("quiet -- single", true).unwrap(), format!("quiet {ONLINE_MOVABLE} -- single"));
        assert_eq!(compose("-- single", true).unwrap(), format!("{ONLINE_MOVABLE} -- single"));
        assert_eq!(compose("quiet --", true).unwrap(), format!("quiet {ONLINE_MOVABLE} --"));
        let to_init = compose("quiet -- memhp_default_state=offline", true).unwrap();
        assert_eq!(to_init, format!("quiet {ONLINE_MOVABLE} -- memhp_default_state=offline"));
    }

    #[test]
    fn the_limit_counts_what_is_added() {
        let user = "x".repeat(MAX_BYTES);
        assert_eq!(compose(&user, false).unwrap().len(), MAX_BYTES);
        let actual_bytes = MAX_BYTES + 1 + ONLINE_MOVABLE.len();
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
