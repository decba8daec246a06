//! Runs SQLite's shell on an in-memory database. It fills a table, and then reads and writes random
//! rows.

use std::fmt::Write as _;
use std::fs::{self, File};

use anyhow::{Context, Result, ensure};
use guest_tools::content::Bytes;

use super::{MIB, MemoryFiles, Phases, mixed, program};

/// Page size of the database. One row fills a page.
const PAGE_BYTES: u64 = 4096;
const BODY_BYTES: u64 = 3900;
const OPERATIONS: u64 = 10_000;
const OPERATIONS_PER_TRANSACTION: u64 = 100;

/// Runs the phases `fill` and `mix`.
pub(super) fn run(mib: u64, phases: &mut Phases) -> Result<u64> {
    let rows = mib * MIB / PAGE_BYTES;
    let files = MemoryFiles::mount()?;
    phases.begin();
    sql(&files, &fill(rows))?;
    phases.end("fill");
    let (statements, expected) = mix(rows);
    let found = sql(&files, &statements)?;
    phases.end("mix");
    ensure!(found == expected, "The rows read differ from the rows written");
    Ok(found.bytes().fold(0, |sum, byte| mixed(sum, byte.into())))
}

/// Returns statements that fill the table. Row bodies are parts of one random text from different
/// offsets, so that no two pages are equal and no page compresses.
fn fill(rows: u64) -> String {
    format!(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER NOT NULL, body BLOB NOT NULL);
         CREATE TEMP TABLE base AS SELECT randomblob(16384) AS bytes;
         BEGIN;
         WITH RECURSIVE ids(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM ids WHERE id + 1 < {rows})
         INSERT INTO t SELECT id, 0, substr(bytes, 1 + id * 7919 % 12000, {BODY_BYTES}) FROM ids, base;
         COMMIT;"
    )
}

/// Returns random statements and their expected output. Each read returns the row as last written,
/// and the last read returns sums over the whole table.
fn mix(rows: u64) -> (String, String) {
    let mut random = Bytes::new(4);
    let mut written = vec![0u64; rows as usize];
    let (mut statements, mut expected) = (String::new(), String::new());
    for operation in 0..OPERATIONS {
        if operation % OPERATIONS_PER_TRANSACTION == 0 {
            statements += if operation == 0 { "BEGIN;\n" } else { "COMMIT;BEGIN;\n" };
        }
        let id = random.below(rows);
        let row = &mut written[id as usize];
        // Writing to a String cannot fail.
        let _ = if random.below(2) == 0 {
            let _ = writeln!(expected, "{}", *row * 10_000 + BODY_BYTES);
            writeln!(statements, "SELECT n * 10000 + length(body) FROM t WHERE id = {id};")
        } else {
            *row += 1;
            writeln!(
                statements,
                "UPDATE t SET n = n + 1, body = CAST(substr(body, 2) || substr(body, 1, 1) AS BLOB) WHERE id = {id};"
            )
        };
    }
    statements += "COMMIT;SELECT count(*), sum(n), sum(n * id) FROM t;\n";
    let sum: u64 = written.iter().sum();
    let sum_of_products: u64 = written.iter().enumerate().map(|(id, n)| id as u64 * n).sum();
    let _ = writeln!(expected, "{rows}|{sum}|{sum_of_products}");
    (statements, expected)
}

/// Runs statements and returns their output. Input and output are files. With pipes, switching
/// between two processes would dominate the time.
fn sql(files: &MemoryFiles, statements: &str) -> Result<String> {
    // The journal is in memory, too.
    let settings = "PRAGMA journal_mode=MEMORY; PRAGMA synchronous=OFF; PRAGMA page_size=4096;\n";
    let (script, printed) = (files.path("script"), files.path("printed"));
    fs::write(&script, format!("{settings}{statements}"))?;
    let status = program("sqlite3")
        .args(["-batch", "-bail"])
        .arg(files.path("database"))
        .stdin(File::open(&script)?)
        .stdout(File::create(&printed)?)
        .status();
    let status = status.context("Cannot start sqlite3")?;
    ensure!(status.success(), "sqlite3 ended with {status}");
    let printed =
        fs::read_to_string(&printed).context("Cannot read the output of sqlite3 as text")?;
    // The first setting prints its value.
    Ok(printed
        .strip_prefix("memory\n")
        .context("sqlite3 does not keep its journal in memory")?
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_output_has_a_line_per_read_and_a_summary() {
        let (statements, expected) = mix(100);
        let reads = statements.matches("SELECT n ").count();
        assert_eq!(expected.lines().count(), reads + 1);
        let writes = statements.matches("UPDATE").count();
        assert_eq!((reads + writes) as u64, OPERATIONS);
        assert!(
            expected.lines().last().unwrap().starts_with(&format!("100|{writes}|")),
            "{expected}"
        );
    }
}
