//! Check of the errors about misspelled words, for the tests of the programs.

use clap::{Arg, Command};

use super::usage_line;

/// Misspells each word that an option or argument of `command` and of its subcommands accepts.
/// Returns the number of words.
///
/// Panics if an error does not list all words and suggest the right one, or if the name of a value
/// lists words but clap has no list of them.
pub fn check_suggestions(command: &Command) -> usize {
    check_below(command, command, &mut vec![command.get_name().to_owned()])
}

/// Checks `command`, the subcommand of `program` after the words `path`.
fn check_below(program: &Command, command: &Command, path: &mut Vec<String>) -> usize {
    let mut count = 0;
    for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
        let words = words(arg);
        let names = arg.get_value_names().unwrap_or_default();
        assert!(
            !words.is_empty() || !names.iter().any(|name| name.contains('|')),
            "{path:?}: the words of {} are only in its name",
            arg.get_id()
        );
        for word in &words {
            let args = [path.clone(), before(command, arg), vec![misspelled(word)]].concat();
            let error = program.clone().try_get_matches_from(&args).expect_err("a wrong word");
            let text = usage_line(&error);
            let suggested = text.contains(&format!("(did you mean '{word}'?)"));
            assert!(suggested && words.iter().all(|word| text.contains(word)), "{args:?}: {text}");
        }
        count += words.len();
    }
    for subcommand in command.get_subcommands() {
        path.push(subcommand.get_name().to_owned());
        count += check_below(program, subcommand, path);
        path.pop();
    }
    count
}

/// Words that the help lists for the value.
fn words(arg: &Arg) -> Vec<String> {
    let values = arg.get_possible_values();
    let shown = values.iter().filter(|value| !value.is_hide_set());
    shown.map(|value| value.get_name().to_owned()).collect()
}

/// Words of the command line that precede the value: the option, or all earlier arguments.
fn before(command: &Command, arg: &Arg) -> Vec<String> {
    if let Some(long) = arg.get_long() {
        return vec![format!("--{long}")];
    }
    let earlier = command.get_positionals().take_while(|earlier| earlier.get_id() != arg.get_id());
    earlier.map(|arg| words(arg).into_iter().next().unwrap_or_else(|| "1".to_owned())).collect()
}

/// Returns a word with its last letter doubled.
pub fn misspelled(word: &str) -> String {
    word.chars().chain(word.chars().last()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_options_and_arguments_are_checked() {
        let phase = Arg::new("phase").value_parser(["full", "new"]);
        let moon = Command::new("moon").arg(Arg::new("name")).arg(phase);
        let level = Arg::new("level").long("level").value_parser(["high", "low"]);
        let tide = Command::new("tide").arg(level).subcommand(moon);
        assert_eq!(check_suggestions(&tide), 4);
    }

    #[test]
    #[should_panic(expected = "the words of level are only in its name")]
    fn words_without_suggestions_are_found() {
        let level = Arg::new("level").long("level").value_name("high|low");
        check_suggestions(&Command::new("tide").arg(level));
    }
}
