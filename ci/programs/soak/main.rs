//! Tests that take hours: many kills of writing guests, power cuts of the host, and guests with too
//! little DRAM. `ci/soak` runs this program.

#![forbid(unsafe_code)]

mod kills;
mod power;
mod pressure;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage:
  soak kills INTERFACE KERNEL ROUNDS SEED VOLUME
      kill ROUNDS guests, two at a time. VOLUME is thick, thin, raw (stop when a sector is torn), or
      the load beside the writer of a thin volume
  soak power TASK SEED VOLUME HEARD
      check the content that the last boot has left, and write until the power is cut. VOLUME is
      that of kills, and allows any interface. HEARD is a file with the output of the previous
      boots. TASK is write, write-and-lie (flushes do
      nothing), look (only check), or look-for-losses (check after write-and-lie)
  soak pressure [--workload NAME,...] [--config NAME,...] [--dram PERCENT,...] [--rounds N]
      run workloads in turn, in guests with less DRAM than they need";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["kills", interface, kernel, rounds, seed, volume] => {
            let volume: kills::Volume = volume.parse()?;
            let setup = volume.setup(interface.parse()?, kernel.parse()?)?;
            kills::run(setup, rounds.parse()?, seed.parse()?)
        }
        ["power", task, seed, volume, earlier_lines] => {
            let task = power::task(task)?;
            match power::run(task, seed.parse()?, volume.parse()?, earlier_lines.as_ref())? {}
        }
        ["pressure", options @ ..] => pressure::run(options),
        _ => bail!("{USAGE}"),
    }
}
