//! Compiles a generated program of several files in parallel with Debian's tcc, and links it. The
//! program should compute the expected sum.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context, Result, ensure};
use guest_tools::content::Bytes;

use super::{MIB, MemoryFiles, Phases, mixed, program};

/// Number of parallel compilers, as for `make -j`.
const JOBS: u64 = 4;
/// Memory per function for its source, its object code with debugging information, and the
/// compiler's data.
const BYTES_PER_FUNCTION: u64 = 2200;
/// Comments make up most of the source. They take as much memory as code but little compile time.
/// Without them, an emulated guest would compile for minutes.
const COMMENT_BYTES: u64 = 12_000;
/// The program calls one out of this many functions, because an emulated guest is slow when it runs
/// code for the first time.
const CALLED: usize = 16;

/// Runs the phases `write`, `compile`, `link` and `run`.
pub(super) fn run(mib: u64, phases: &mut Phases) -> Result<u64> {
    let functions = mib * MIB / (BYTES_PER_FUNCTION + COMMENT_BYTES) / JOBS;
    let files = MemoryFiles::mount()?;
    phases.begin();
    for unit in 0..JOBS {
        write_unit(&files.path(&format!("u{unit}.c")), unit, functions)?;
    }
    write_main(&files.path("main.c"))?;
    phases.end("write");
    let units: Vec<String> =
        (0..JOBS).map(|unit| format!("u{unit}")).chain(["main".to_owned()]).collect();
    let compile = |unit: &String| {
        tcc()
            .args(["-g", "-c", "-o"])
            .arg(files.path(&format!("{unit}.o")))
            .arg(files.path(&format!("{unit}.c")))
            .spawn()
    };
    let jobs =
        units.iter().map(compile).collect::<Result<Vec<Child>, _>>().context("Cannot start tcc")?;
    for mut job in jobs {
        ensure!(job.wait()?.success(), "tcc failed to compile a unit");
    }
    phases.end("compile");
    let objects = units.iter().map(|unit| files.path(&format!("{unit}.o")));
    let linked = tcc()
        .args(["-nostdlib", "-static", "-o"])
        .arg(files.path("program"))
        .args(objects)
        .status();
    ensure!(linked.context("Cannot start tcc")?.success(), "tcc failed to link the program");
    phases.end("link");
    let expected = expected_sum(functions);
    let status = program(files.path("program")).status().context("Cannot start the program")?;
    ensure!(status.code() == Some(i32::from(expected as u8)), "The program ended with {status}");
    phases.end("run");
    Ok(mixed(0, expected.into()))
}

/// The C library is not used, so its headers need not be installed.
fn tcc() -> Command {
    let mut command = program("tcc");
    command.arg("-nostdinc");
    command
}

/// Computation that each function performs, here and in the generated program.
fn function(number: u64, x: u32) -> u32 {
    let mut t = [x, x ^ number as u32, number as u32, !x];
    for k in 0..4 {
        t[k] = t[k].wrapping_mul(2_654_435_761).wrapping_add(t[(k + 1) & 3] >> (number % 29 + 1));
        if t[k] & (1 << (number % 20)) != 0 {
            t[(k + 2) & 3] ^= x.wrapping_add(number as u32 * 7);
        }
    }
    t.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

fn write_unit(path: &Path, unit: u64, functions: u64) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut letters = Bytes::new(unit);
    let mut comment = vec![0; COMMENT_BYTES as usize];
    for index in 0..functions {
        let number = unit * functions + index;
        letters.fill(&mut comment);
        comment.iter_mut().for_each(|byte| *byte = b'a' + *byte % 26);
        file.write_all(b"/* ")?;
        file.write_all(&comment)?;
        writeln!(
            file,
            " */
static unsigned f{number}(unsigned x) {{ unsigned t[4] = {{ x, x ^ {number}u, {number}u, ~x }}; int k;
for (k = 0; k < 4; k++) {{ t[k] = t[k] * 2654435761u + (t[(k + 1) & 3] >> {});
if (t[k] & {}u) t[(k + 2) & 3] ^= x + {}u; }} return t[0] + t[1] + t[2] + t[3]; }}",
            number % 29 + 1,
            1 << (number % 20),
            number * 7,
        )?;
    }
    // Calls form a chain: each result is the argument of the next call.
    writeln!(file, "static unsigned (*const all[])(unsigned) = {{")?;
    for index in (0..functions).step_by(CALLED) {
        write!(file, "f{},", unit * functions + index)?;
    }
    writeln!(
        file,
        "}};\nunsigned unit{unit}(unsigned x) {{ unsigned k; for (k = 0; k < sizeof all / sizeof *all; k++) x = all[k](x); return x; }}"
    )?;
    Ok(file.flush()?)
}

/// `exit` is system call 60 (arch/x86/entry/syscalls/syscall_64.tbl).
fn write_main(path: &Path) -> Result<()> {
    let declared: String =
        (0..JOBS).map(|unit| format!("unsigned unit{unit}(unsigned);\n")).collect();
    let called = (0..JOBS).fold("1u".to_owned(), |x, unit| format!("unit{unit}({x})"));
    let text = format!(
        "{declared}void _start(void) {{ unsigned long code = {called} & 255;
__asm__ volatile (\"syscall\" : : \"a\"(60L), \"D\"(code)); }}\n"
    );
    Ok(fs::write(path, text)?)
}

fn expected_sum(functions: u64) -> u32 {
    let called = (0..JOBS)
        .flat_map(|unit| (0..functions).step_by(CALLED).map(move |index| unit * functions + index));
    called.fold(1, |x, number| function(number, x))
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_sum_covers_the_called_functions() {
        let path = std::env::temp_dir().join(format!("guest-tool-unit-{}", std::process::id()));
        let mut x = 1;
        for unit in 0..JOBS {
            write_unit(&path, unit, 40).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            let table = text.lines().find(|line| line.ends_with(",};")).unwrap();
            let called =
                table.trim_end_matches(",};").split(',').map(|name| name[1..].parse().unwrap());
            x = called.fold(x, |x, number| function(number, x));
        }
        fs::remove_file(path).unwrap();
        assert_eq!(x, expected_sum(40));
    }
}
