//! Tables for terminal output.

use foreshore_types::size::Size;

/// Formats rows under a header. Columns are as wide as necessary, except the last column, which
/// contains text of any length. The first `left` columns are left-aligned. The others contain
/// numbers and are right-aligned.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    left: usize,
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let rows: Vec<_> = std::iter::once(header.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            match column {
                _ if column + 1 == N => text.push_str(&format!("{gap}{cell}")),
                _ if column < left => text.push_str(&format!("{gap}{cell:<width$}")),
                _ => text.push_str(&format!("{gap}{cell:>width$}")),
            }
        }
        text.push('\n');
    }
    text
}

/// Table cell with a size in bytes.
pub(crate) fn size_cell(bytes: u64) -> String {
    Size(bytes).rounded()
}
