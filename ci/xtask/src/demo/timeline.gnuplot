# Draws timeline.csv: gnuplot -e "format='svg'" timeline.gnuplot, or format='png'. Columns are found
# by name.
set datafile separator comma
set datafile columnheaders
if (format eq 'svg') {
    set terminal svg size 1200, 1360 fixed font 'DejaVu Sans,12' background rgb 'white'
    set output 'timeline.svg'
} else {
    set terminal pngcairo size 1200, 1360 font 'DejaVu Sans,10' background rgb 'white'
    set output 'timeline.png'
}

mib(bytes) = bytes / 1048576.0
of(vm, value) = (strcol('vm') eq vm) ? value : NaN
vm = '@VM@'
other = '@OTHER_VM@'
thin = '@THIN_VM@'
data = 'timeline.csv'

set multiplot
set xrange [0:@END@]
set lmargin at screen 0.075
set rmargin at screen 0.835
set grid ytics lc rgb '#dddddd'
set border 3 lc rgb '#555555'
set tics nomirror
set xtics format ''
set yrange [0:*]
set ytics 200
# The opaque box of a panel's title hides event lines that pass behind it.
set style textbox opaque noborder fillcolor rgb 'white' margins 0.6, 0.4

top(panel) = 0.825 - 0.158 * panel
height = 0.122

@MARKS@
set label 1000 "Foreshore: a guest's memory grows into PM and back" at screen 0.075, 0.982 font ',16'
set label 1001 "512 MiB of DRAM, Redis filled with 779 MiB and flushed; then a volume of the same pool. Dotted: events, as in demo.log" \
    at screen 0.075, 0.962 tc rgb '#555555'

set tmargin at screen top(0)
set bmargin at screen top(0) - height
set key at screen 0.85, top(0) left top Left reverse vertical samplen 2 spacing 1.3 font ',10'
set label 1002 "PM zone of the VM '@VM@' (policy=psi)" at graph 0.002, screen top(0) + 0.013 front boxed font ',11'
set ylabel 'MiB'
plot 0 with lines lw 0.5 lc rgb '#cccccc' notitle, \
     data using 'elapsed_s':(of(vm, mib(column('pm_resident_bytes')))) with filledcurves x1 fc rgb '#cfe3f5' title 'resident', \
     '' using 'elapsed_s':(of(vm, mib(column('pm_requested_bytes')))) with steps lw 1.5 dt 2 lc rgb '#d1495b' title 'requested', \
     '' using 'elapsed_s':(of(vm, mib(column('pm_plugged_bytes')))) with lines lw 2 lc rgb '#1f5fa6' title 'plugged'

do for [n = 1:99] { unset label n; unset arrow 100 + n; unset arrow 200 + n }
unset label 1000
unset label 1001

set tmargin at screen top(1)
set bmargin at screen top(1) - height
set key at screen 0.85, top(1)
set label 1002 "DRAM zone of the VM '@VM@'" at graph 0.002, screen top(1) + 0.013
plot 0 with lines lw 0.5 lc rgb '#cccccc' notitle, \
     data using 'elapsed_s':(of(vm, mib(column('dram_resident_bytes')))) with filledcurves x1 fc rgb '#dcebd5' title 'resident', \
     '' using 'elapsed_s':(of(vm, mib(column('dram_boot_bytes') + column('dram_requested_bytes')))) with steps lw 1.5 dt 2 lc rgb '#d1495b' title 'boot + requested', \
     '' using 'elapsed_s':(of(vm, mib(column('dram_boot_bytes') + column('dram_plugged_bytes')))) with lines lw 2 lc rgb '#3c7d22' title 'boot + plugged'

set tmargin at screen top(2)
set bmargin at screen top(2) - height
set key at screen 0.85, top(2)
set label 1002 "the pool of the VM '@VM@', and later of '@THIN_VM@', whose volume is thin" at graph 0.002, screen top(2) + 0.013
plot 0 with lines lw 0.5 lc rgb '#cccccc' notitle, \
     data using 'elapsed_s':(of(vm, mib(column('pool_volume_bytes') + column('pool_memory_bytes') + column('pool_free_bytes')))) with filledcurves x1 fc rgb '#eeeeee' title 'free', \
     '' using 'elapsed_s':(of(vm, mib(column('pool_volume_bytes') + column('pool_memory_bytes')))) with filledcurves x1 fc rgb '#8fb8de' title 'lent as memory', \
     '' using 'elapsed_s':(of(vm, mib(column('pool_volume_bytes')))) with filledcurves x1 fc rgb '#e0a458' title 'volume', \
     '' using 'elapsed_s':(of(thin, mib(column('pool_volume_bytes') + column('pool_memory_bytes') + column('pool_free_bytes')))) with filledcurves x1 fc rgb '#eeeeee' notitle, \
     '' using 'elapsed_s':(of(thin, mib(column('pool_volume_bytes') + column('pool_memory_bytes')))) with filledcurves x1 fc rgb '#8fb8de' notitle, \
     '' using 'elapsed_s':(of(thin, mib(column('pool_volume_bytes')))) with filledcurves x1 fc rgb '#e0a458' notitle

set tmargin at screen top(3)
set bmargin at screen top(3) - height
set key at screen 0.85, top(3)
set label 1002 "memory stall (PSI) of both VMs: '@VM@', and '@OTHER_VM@' with the same fill" at graph 0.002, screen top(3) + 0.013
set ylabel 's'
set ytics autofreq
plot 0 with lines lw 0.5 lc rgb '#cccccc' notitle, \
     data using 'elapsed_s':(of(vm, column('stall_some_seconds'))) with lines lw 2 lc rgb '#1f5fa6' title "@VM@, some", \
     '' using 'elapsed_s':(of(vm, column('stall_full_seconds'))) with lines lw 1.5 dt 3 lc rgb '#1f5fa6' title "@VM@, full", \
     '' using 'elapsed_s':(of(other, column('stall_some_seconds'))) with lines lw 2 lc rgb '#d1495b' title "@OTHER_VM@, some", \
     '' using 'elapsed_s':(of(other, column('stall_full_seconds'))) with lines lw 1.5 dt 3 lc rgb '#d1495b' title "@OTHER_VM@, full"

set tmargin at screen top(4)
set bmargin at screen top(4) - height
set key at screen 0.85, top(4)
set label 1002 "swapped out by both VMs" at graph 0.002, screen top(4) + 0.013
set ylabel 'MiB'
set xlabel 'seconds, as in demo.log'
set xtics format '%g'
plot 0 with lines lw 0.5 lc rgb '#cccccc' notitle, \
     data using 'elapsed_s':(of(vm, column('swapped_out_pages') / 256)) with lines lw 2 lc rgb '#1f5fa6' title '@VM@', \
     '' using 'elapsed_s':(of(other, column('swapped_out_pages') / 256)) with lines lw 2 lc rgb '#d1495b' title '@OTHER_VM@'
unset multiplot
