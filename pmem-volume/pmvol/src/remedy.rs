//! Commands and flags of pmvol that resolve an error of the library. The library itself mentions
//! neither commands nor flags.

use pmem_volume::PoolError;
use pmem_volume::btt::BttError;
use pmem_volume::btt_file::BttFileError;

use super::commands::HoldsData;

/// Returns a clause to print after the error.
pub(crate) fn for_error(error: &anyhow::Error) -> Option<&'static str> {
    if let Some(error) = error.downcast_ref() {
        return for_pool_error(error);
    }
    if let Some(HoldsData { .. }) = error.downcast_ref() {
        return Some("--force deletes it with its data");
    }
    if let Some(BttFileError::Pool { .. }) = error.downcast_ref() {
        return Some("name one of its volumes, without --file");
    }
    match error.downcast_ref()? {
        BttError::Ambiguous { .. } => Some("`pmvol btt export` copies all readable sectors"),
        _ => None,
    }
}

fn for_pool_error(error: &PoolError) -> Option<&'static str> {
    Some(match error {
        PoolError::Missing { .. } | PoolError::NotAPool { .. } => "`pmvol create` creates a pool",
        PoolError::DeviceReadOnly { .. } => "`pmvol info` and `pmvol check` can read it",
        PoolError::InUse { .. } => "`pmvol info` can read it meanwhile",
        PoolError::DeviceNotEmpty { .. } => "--force creates a pool there and erases the device",
        PoolError::DeviceGrowthNotEmpty { .. } => "--force uses it and erases its content",
        PoolError::DeviceUnknownVolumes { .. }
        | PoolError::SuperblocksDamaged { .. }
        | PoolError::Truncated { .. }
        | PoolError::Damaged { .. } => "see `pmvol check` and `pmvol repair`",
        PoolError::VolumeUnusable { .. } => "see `pmvol check`",
        PoolError::PoolFull { .. } => {
            "`pmvol grow` makes it larger; a thin volume with a smaller --reserve needs less"
        }
        PoolError::NotThin { .. } => "`pmvol volume convert --thin` makes it thin",
        PoolError::NoSuchVolume { .. } => "`pmvol volume create` creates one",
        PoolError::VolumeComplete { .. } => "`pmvol volume delete` deletes it",
        PoolError::ShrinkRefused { .. } => "--shrink allows it",
        PoolError::SplitHoldsData { .. } => "--force splits it anyway and erases its content",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use clap::CommandFactory;

    use crate::args::Arguments;

    /// Source files of pmvol, with continued lines joined.
    fn sources(folder: &Path) -> Vec<(String, String)> {
        let mut sources = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources.extend(self::sources(&path));
            } else {
                let text = fs::read_to_string(&path).unwrap();
                let mut joined = String::new();
                for line in text.split_inclusive('\n') {
                    match line.strip_suffix("\\\n") {
                        Some(line) => joined.push_str(line.trim_start()),
                        None => joined.push_str(line),
                    }
                }
                sources.push((path.display().to_string(), joined));
            }
        }
        sources
    }

    fn has_flag(command: &clap::Command, flag: &str) -> bool {
        command.get_arguments().any(|argument| argument.get_long() == Some(flag))
    }

    fn any_has_flag(command: &clap::Command, flag: &str) -> bool {
        has_flag(command, flag) || command.get_subcommands().any(|sub| any_has_flag(sub, flag))
    }

    /// Checks that the command and flags that follow `pmvol` exist.
    fn check(words: &[&str]) -> Result<(), String> {
        let mut program = Arguments::command();
        program.build();
        let mut command = &program;
        for word in words {
            if let Some(flag) = word.strip_prefix("--") {
                if !has_flag(command, flag) {
                    return Err(format!("`{}` has no flag --{flag}", command.get_name()));
                }
            } else if let Some(sub) = command.find_subcommand(word) {
                command = sub;
            } else if command.has_subcommands() && !word.starts_with('{') {
                return Err(format!("`{}` has no command {word:?}", command.get_name()));
            }
        }
        Ok(())
    }

    #[test]
    fn commands_named_in_messages_exist_with_their_flags() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut found = 0;
        for (path, text) in sources(&folder) {
            for named in text.split("`pmvol ").skip(1) {
                let command = named.split('`').next().unwrap();
                let words: Vec<_> = command.split_whitespace().collect();
                if command.contains('\n') {
                    continue;
                }
                check(&words).unwrap_or_else(|error| panic!("{path}: `pmvol {command}`: {error}"));
                found += 1;
            }
        }
        assert!(found > 20, "{found}");
        assert!(check(&["volume", "frobnicate"]).is_err() && check(&["info", "--force"]).is_err());
    }

    #[test]
    fn flags_named_in_clauses_exist() {
        let text = include_str!("remedy.rs").split("#[cfg(test)]").next().unwrap();
        let flags: Vec<_> = text
            .split("--")
            .skip(1)
            .map(|rest| rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap())
            .collect();
        assert!(flags.contains(&"shrink"), "{flags:?}");
        for flag in flags {
            assert!(any_has_flag(&Arguments::command(), flag), "--{flag}");
        }
    }
}
