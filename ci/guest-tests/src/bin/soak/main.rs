//! What takes long: many kills of guests that write, and power cuts of the host. `ci/soak` runs it.

mod kills;
mod power;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage:
  soak kills INTERFACE KERNEL ROUNDS SEED [raw]  kill so many guests, two at a time; raw: until a sector is torn
  soak power TASK SEED HEARD                     write until the power is cut, after a look at what the last boot has left.
                                                 HEARD: what the boots before have said. TASK: write, write-and-lie
                                                 (flushes do nothing), look, look-for-losses (what lies have left)";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["kills", interface, kernel, rounds, seed, raw @ ..] if raw.is_empty() || raw == ["raw"] => {
            kills::run(interface.parse()?, kernel.parse()?, rounds.parse()?, seed.parse()?, !raw.is_empty())
        }
        ["power", task, seed, heard] => {
            match power::run(power::task(task)?, seed.parse()?, heard.as_ref())? {}
        }
        _ => bail!("{USAGE}"),
    }
}
