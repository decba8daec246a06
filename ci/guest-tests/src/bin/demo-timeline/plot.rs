//! What gnuplot is told.

use crate::prometheus::Range;
use crate::table::{OTHER_VM, VM};

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    pub elapsed_s: f64,
    pub what: String,
}

/// The script: gnuplot runs it in the directory of timeline.csv.
pub fn script(range: &Range, events: &[Event]) -> String {
    let marks: String = events.iter().enumerate().map(|(index, event)| mark(index + 1, event)).collect();
    include_str!("timeline.gnuplot")
        .replace("@END@", &range.len_s().to_string())
        .replace("@MARKS@", &marks)
        .replace("@VM@", VM)
        .replace("@OTHER_VM@", OTHER_VM)
}

/// A line through every panel; the top one carries its name.
fn mark(number: usize, event: &Event) -> String {
    let at = event.elapsed_s;
    // gnuplot reads backslash and quotes in a string; events are our own, and plain.
    let what: String = event.what.chars().filter(|c| !matches!(c, '"' | '\\')).collect();
    format!(
        "set arrow {number} from {at:.2}, graph 0 to {at:.2}, graph 1 nohead back lw 1 lc rgb '#999999' dt 3\n\
         set label {number} \"{what}\" at {at:.2}, graph 1.03 rotate by 40 left noenhanced font ',9' tc rgb '#555555'\n"
    )
}
