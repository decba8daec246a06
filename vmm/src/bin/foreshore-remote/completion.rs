//! Values that the shell completes: options of the VMM's flags, volumes of a pool, and IDs of a
//! running VM.

use std::ffi::OsString;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use balloon::controller::Rules;
use balloon::policy::Policy;
use clap::{Arg, Command};
use foreshore::api::{Client, MemoryAnswer};
use foreshore::config::{FIXED_SIZE, TABLES, VmConfig};
use foreshore::vm::request::VmInfo;
use foreshore_cli::{
    FlagOption, GivenOptions, Values, complete_options, complete_paths, complete_values,
};
use foreshore_config::{Key, Table};
use pmem_volume::{OpenMode, Pool};
use serde::de::DeserializeOwned;

use crate::API_SOCKET;

/// Time that a completion waits for a VMM.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

const SOCKET_FLAG: &str = "--api-socket";
const POLICY_KEY: &str = "policy";
/// Values of a switch.
const SWITCH: [&str; 2] = ["on", "off"];

/// Adds completion of values to the description of the VMM.
pub(crate) fn of_vmm(description: Command) -> Command {
    description.mut_args(|arg| match arg.get_long() {
        Some("pressure") => arg.add(complete_options(settings)),
        Some(flag) => with_table(arg.clone(), flag),
        None => arg,
    })
}

/// Adds completion of values to the description of the client.
pub(crate) fn of_client(command: Command) -> Command {
    let verb = command.get_name().to_owned();
    let command = command.mut_args(|arg| match (&*verb, arg.get_id().as_str()) {
        (_, "api_socket") => arg.add(complete_paths(is_socket)),
        (_, "policy") => arg.add(complete_options(policies)),
        (_, "settings") => arg.add(complete_options(settings)),
        (_, "dry_run") | ("dry-run", "switch") => {
            arg.add(complete_values(|_| SWITCH.map(str::to_owned).to_vec()))
        }
        ("remove-device", "id") => arg.add(complete_values(removable_devices)),
        ("resize-disk", "disk") => arg.add(complete_values(disks)),
        ("resize-zone", "id") | ("resume", "zone") => arg.add(complete_values(zones)),
        (verb, "config") => match verb.strip_prefix("add-") {
            Some(flag) => with_table(arg, flag),
            None => arg,
        },
        _ => arg,
    });
    command.mut_subcommands(of_client)
}

/// Adds completion of the options of `--flag`.
fn with_table(arg: Arg, flag: &str) -> Arg {
    let is_of_flag = |table: &&Table| table.flag.strip_prefix("--") == Some(flag);
    match TABLES.iter().find(is_of_flag) {
        Some(table) => arg.add(complete_options(|given| table_options(table, given))),
        None => arg,
    }
}

fn table_options(table: &Table, given: &GivenOptions) -> Vec<FlagOption> {
    let words = FlagOption::without_key(Values::words(table.words.iter().copied()));
    let option = |key: Key| {
        let values = match (table.flag, key.name) {
            (SOCKET_FLAG, "path") => Values::Paths(is_socket),
            ("--pm-volume", "name") => volumes(given.value("pool")),
            _ => values_of((key.syntax)()),
        };
        FlagOption::new(key.name, values).bare(key.is_bare).repeated(key.is_repeated)
    };
    std::iter::once(words).chain((table.keys)().into_iter().map(option)).collect()
}

/// Derives the values of a key from their form in the help: `PATH`, or words such as `on|off`.
fn values_of(syntax: String) -> Values {
    let forms: Vec<_> = syntax.split('|').collect();
    if forms.iter().any(|form| ["PATH", "FILE"].contains(form)) {
        return Values::Paths(|_| true);
    }
    let is_word = |form: &&str| {
        !form.contains(|letter: char| "[:".contains(letter) || letter.is_ascii_uppercase())
    };
    Values::words(forms.into_iter().filter(is_word))
}

fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.file_type().is_socket())
}

/// Volumes of the pool at `path`. The pool may be in use: a peek takes no lock and writes nothing.
fn volumes(path: Option<&str>) -> Values {
    let Some(path) = path.map(str::to_owned) else { return Values::Unlisted };
    Values::Words(Box::new(move || {
        let pool = Pool::open(Path::new(&path), OpenMode::Peek);
        let volumes = pool.map(|pool| pool.volumes()).unwrap_or_default();
        volumes.into_iter().map(|volume| volume.name).collect()
    }))
}

/// Policies, followed by the parameters of the given policy and of the rules above it.
fn policies(given: &GivenOptions) -> Vec<FlagOption> {
    let names = FlagOption::without_key(Values::words(Policy::NAMES));
    std::iter::once(names).chain(params(given.first())).collect()
}

/// Options of `--pressure`.
fn settings(given: &GivenOptions) -> Vec<FlagOption> {
    let table = TABLES.iter().find(|table| table.flag == "--pressure");
    let keys = table.into_iter().flat_map(|table| table_options(table, given));
    keys.chain(params(given.value(POLICY_KEY))).collect()
}

/// Parameters of a policy and of the rules above it.
fn params(policy: Option<&str>) -> impl Iterator<Item = FlagOption> {
    let policy = policy.and_then(Policy::from_name);
    let params = policy.iter().flat_map(Policy::table).chain(Rules::TABLE);
    // The size of the policy `fixed` is left out, because it is a key of `--pressure` itself.
    let params: Vec<_> = params.filter(|param| param.name != FIXED_SIZE).collect();
    params.into_iter().map(|param| FlagOption::new(param.name, Values::Unlisted))
}

/// Devices that `remove-device` can remove.
fn removable_devices(words: &[OsString]) -> Vec<String> {
    let config = config(words);
    let ids = config.iter().flat_map(VmConfig::removable_ids);
    ids.map(|(_flag, id)| id.to_owned()).collect()
}

fn disks(words: &[OsString]) -> Vec<String> {
    let disks = config(words).into_iter().flat_map(|config| config.disks);
    disks.filter_map(|disk| disk.id).collect()
}

fn zones(words: &[OsString]) -> Vec<String> {
    let memory = answer::<MemoryAnswer>(words, "vm.memory");
    memory.into_iter().flat_map(|memory| memory.zones).map(|zone| zone.id).collect()
}

fn config(words: &[OsString]) -> Option<VmConfig> {
    answer::<VmInfo>(words, "vm.info").map(|info| info.config)
}

/// Returns the answer of the VMM to a call, if it arrives in time.
fn answer<T: DeserializeOwned>(words: &[OsString], call: &str) -> Option<T> {
    let client = Client::new(Path::new(&socket_of(words)?));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = async { tokio::time::timeout(ANSWER_TIMEOUT, client.get(call)).await };
    serde_json::from_slice(&runtime.block_on(answer).ok()?.ok()?).ok()
}

/// Path of the API socket in the command line or the environment.
fn socket_of(words: &[OsString]) -> Option<OsString> {
    let value = |(nth, word): (usize, &OsString)| match word.to_str()?.strip_prefix(SOCKET_FLAG)? {
        "" => words.get(nth + 1).cloned(),
        value => value.strip_prefix('=').map(OsString::from),
    };
    words.iter().enumerate().find_map(value).or_else(|| std::env::var_os(API_SOCKET))
}
